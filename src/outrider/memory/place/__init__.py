"""Which KV entries live where: layers that move between fast memory and a slow tier, elastic buffers over the tier."""

from outrider.memory.place.buffers import Rows
from outrider.memory.place.elastic import Elastic
from outrider.memory.place.offload import Offload
from outrider.memory.place.pages import PageMover
from outrider.memory.place.placement import Placement
from outrider.memory.place.rules import Rules, Shape
from outrider.memory.place.single import Pass, Run, SingleTier
from outrider.memory.place.staging import Staging
from outrider.memory.place.step import Layout, Need, Step
from outrider.types import SlowView

__all__ = [
    "Elastic",
    "Layout",
    "Need",
    "Offload",
    "PageMover",
    "Pass",
    "Placement",
    "Rows",
    "Rules",
    "Run",
    "Shape",
    "SingleTier",
    "SlowView",
    "Staging",
    "Step",
]
