"""What the compiled step is told, as records of addresses and sizes: one machine function then serves every model."""

from __future__ import annotations

import numpy as np

MATRIX = np.dtype([(name, np.int64) for name in ("data", "bias", "tiles", "groups", "kind", "tile_bytes", "n")])
WQ, WK, WV, WO, GATE, UP, DOWN = range(7)  # columns of the matrix table [layers + 1, 7]
EMBED, HEAD = 0, 1  # columns of its last row

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("attn_norm", "attn_norm_bias", "mlp_norm", "mlp_norm_bias", "q_norm", "k_norm", "window"),
            *("tap", "query_tap"),
        )
    ]
)

_MODEL = (
    *("num_layers", "hidden", "heads", "kv_heads", "head_dim", "head_pad", "q_width", "kv_width", "inter"),
    *("layer_norm", "activation", "gated", "rope", "final_norm", "final_norm_bias"),
    *("pos_embed", "position_offset", "integers"),
)
MODEL = np.dtype([(name, np.int64) for name in _MODEL] + [("eps", np.float32), ("scale", np.float32)])

#: Batch (addresses of its arrays), the product's address, workspace (addresses and strides in bytes) and results.
_STEP = (
    *("rows", "sequences", "tokens", "positions", "slots", "row_starts", "contexts", "pages", "page_columns"),
    *("ancestors", "logit_rows", "logits", "wanted", "best", "features", "queries"),
    *("selected", "counts", "groups", "selected_heads", "selected_columns"),
    *("product", "kv_kind", "page_size", "cos", "sin", "sync"),
    *("x", "x_stride", "normed", "qkv", "qkv_stride", "query", "query_stride", "mixed", "mixed_stride"),
    *("hidden", "hidden_stride", "q", "q_stride", "meta", "meta_stride", "meta_plane"),
    *("tile", "entries", "chunk", "state", "state_stride", "partial", "chunks", "lead", "common", "common_stride"),
)
STEP = np.dtype([(name, np.int64) for name in _STEP])
CACHE = np.dtype([(name, np.int64) for name in ("keys", "values", "key_scales", "value_scales")])

PLANES = 5  # numbers per row and group beside its integers, see rows.quantise_row
PRIVATE = 8  # up to so many rows every thread prepares its own copy instead of meeting the others
CHUNK = 128  # entries of attention between two merges; part of the result's definition
BLOCK = 8  # rows that share one pass over keys and values
SPLIT = 16  # up to so many rows of a batch, chunks are spread over the threads
