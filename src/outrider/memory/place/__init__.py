"""Which KV entries live where: elastic buffers over a slow tier."""

from outrider.memory.place.buffers import Rows
from outrider.memory.place.elastic import Elastic
from outrider.memory.place.offload import Need, Offload, SlowView, Step, region_pages, tier_blocks

__all__ = ["Elastic", "Need", "Offload", "Rows", "SlowView", "Step", "region_pages", "tier_blocks"]
