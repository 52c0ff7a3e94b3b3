"""Places for KV blocks: host memory and disk, one protocol."""

from outrider.memory.tiers.base import LostBlocksError, Tier
from outrider.memory.tiers.codec import Codec, make_codec
from outrider.memory.tiers.disk import DiskTier
from outrider.memory.tiers.host import HostTier

__all__ = ["Codec", "DiskTier", "HostTier", "LostBlocksError", "Tier", "make_codec"]
