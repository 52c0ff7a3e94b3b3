"""Which KV entries live where: elastic buffers over a slow tier."""

from outrider.memory.place.buffers import Rows
from outrider.memory.place.elastic import Elastic
from outrider.memory.place.offload import Offload
from outrider.memory.place.step import Layout, Need, Step
from outrider.types import SlowView

__all__ = ["Elastic", "Layout", "Need", "Offload", "Rows", "SlowView", "Step"]
