"""How packed weights lie in memory; read by the packer (pack.py), the products (product.py) and the embedding.

A matrix [N, K] is cut into tiles of 16 output channels, a tile into groups of 32 inputs, K and N padded with zeros.
Inside a group, for every 4 inputs the 16 channels x 4 bytes stand together (64 bytes, one vector), so that a
product adds up 16 channels side by side and never sums across a vector.

    F32      32 x 16 floats
    Q4_*     256 bytes: byte j of vector v holds inputs of step 2 v (low nibble) and 2 v + 1 (high)
    Q8_*     512 bytes, each weight + 128 as an unsigned byte
    *_F16    after the integers: 16 scales (and, for Q4, 16 minima) in fp16
    *_F32    the same in fp32
    Q4_K     8 groups share a head of 16 fp16 scales and 16 fp16 minima; a group ends with 16 + 16 uint8 factors
    Q6_K     weight + 32: 256 bytes of low nibbles as in Q4, then 128 bytes of high pairs (bits 2 s of byte j of vector
             v: step 4 v + s), then 16 + 16 int8 counts (inputs 0..15, 16..31); 8 groups share a head of 16 fp16 factors
"""

from __future__ import annotations

TILE, GROUP, SUPER = 16, 32, 8
F32, Q4_F16, Q4_F32, Q4_K, Q8_F16, Q8_F32, Q6_K = range(7)
NAMES = ("float32", "q4", "q4 (fp32 scales)", "q4_k", "q8", "q8 (fp32 scales)", "q6_k")
BITS = (32, 4, 4, 4, 8, 8, 6)  # of one weight's integer
#: Bytes before 8 groups that share a head.
HEADS = (0, 0, 0, 64, 0, 0, 32)
#: Bytes of one group of one tile.
GROUP_BYTES = (2048, 256 + 64, 256 + 128, 256 + 32, 512 + 32, 512 + 64, 384 + 32)


def tile_bytes(kind: int, groups: int) -> int:
    """Bytes of one tile of `groups` groups."""
    return groups * GROUP_BYTES[kind] + groups // SUPER * HEADS[kind]
