"""GGUF files: integers and scales as stored, rows in our order, headers as config.json, and what is refused."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

import loading
from loading import Kind
from outrider.errors import ModelError, OutriderError
from outrider.models import llama
from outrider.models.load import load_model
from outrider.models.load.gguf_file import GGUFTensor, read_gguf
from outrider.models.load.gguf_model import GGUFWeight, config_of, half_split_order
from outrider.models.load.grouped import EXACT, UNPACK, grouped, values_of
from outrider.models.spec import SlicedWeight

REQUANTISED = [kind for kind in UNPACK if kind not in EXACT]


def weight(kind: Kind, rows: int = 5, seed: int = 0) -> GGUFWeight:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    blocks = 512 // block
    return GGUFWeight(GGUFTensor("w", (rows, 512), kind, loading.random_rows(kind, rows, blocks, seed)))


@pytest.mark.parametrize("kind", sorted(EXACT), ids=lambda kind: kind.name)
def test_exact_types_give_what_the_file_says_bit_for_bit(kind: Kind) -> None:
    stored = weight(kind)
    if kind == Kind.Q8_0:
        data = stored.tensor.rows.reshape(5, -1, 34)
        data[:, :, 2:] = np.where(data[:, :, 2:] == 128, 129, data[:, :, 2:])
    groups = stored.groups()
    assert groups is not None
    assert groups.q.shape == (5, 512)
    assert groups.scale.shape == (5, 32 if groups.bits == 6 else 16)
    assert (groups.minimum is None) == (groups.bits > 4)
    assert (groups.factor is None) == (groups.bits != 6)
    assert groups.q.dtype == (np.uint8 if groups.bits == 4 else np.int8)
    expected = dequantize(stored.tensor.rows, kind)
    np.testing.assert_array_equal(values_of(groups), expected)
    np.testing.assert_array_equal(stored.dense(), expected)
    assert len(np.unique(groups.q)) > 15


@pytest.mark.parametrize("kind", REQUANTISED, ids=lambda kind: kind.name)
def test_requantised_types_stay_within_half_a_step(kind: Kind) -> None:
    stored = weight(kind)
    groups = stored.groups()
    assert groups is not None
    assert groups.bits == 8
    assert groups.minimum is None
    expected = dequantize(stored.tensor.rows, kind)
    error = np.abs(values_of(groups) - expected).reshape(5, 16, 32)
    assert error.max() > 0
    assert (error <= groups.scale[..., None] * 0.50001).all()
    assert np.abs(groups.q).max() == 127
    np.testing.assert_array_equal(groups.scale.astype(np.float16), groups.scale)
    np.testing.assert_array_equal(stored.dense(), expected)


@pytest.mark.parametrize(("kind", "factor"), [(Kind.Q5_1, 6e-8), (Kind.Q5_K, 6e4)], ids=["tiny", "huge"])
def test_requantised_scales_beyond_fp16_stay_fp32(kind: Kind, factor: float) -> None:
    rows = loading.random_rows(kind, 4, 1)
    rows.view(np.float16)[:, :2] = 0
    rows.view(np.float16)[:2, 0] = factor
    groups = grouped(rows, kind)
    assert groups is not None
    error = np.abs(values_of(groups) - dequantize(rows, kind)).reshape(*groups.scale.shape, 32)
    assert (error <= groups.scale[..., None] * 0.50001).all()
    with np.errstate(over="ignore"):
        assert (groups.scale != groups.scale.astype(np.float16)).any()
    assert not groups.scale[2:].any()


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL], ids=lambda kind: kind.name)
def test_other_types_are_read_densely(kind: Kind) -> None:
    stored = weight(kind)
    assert stored.groups() is None
    np.testing.assert_array_equal(stored.dense(), dequantize(stored.tensor.rows, kind))


def test_a_block_of_zeros_and_minus_128() -> None:
    zeros = grouped(np.zeros((1, 210), np.uint8), Kind.Q6_K)
    assert zeros is not None
    assert not values_of(zeros).any()
    rows = loading.random_rows(Kind.Q8_0, 1, 1)
    rows[0, 5] = 128  # int8 -128, which no reference quantiser writes: outside of the 8-bit form
    assert grouped(rows, Kind.Q8_0) is None
    odd = GGUFWeight(GGUFTensor("w", (1, 32), Kind.Q8_0, rows))
    np.testing.assert_array_equal(odd.dense(), dequantize(rows, Kind.Q8_0))


def test_many_rows_are_cut_into_chunks_without_a_seam() -> None:
    rows = loading.random_rows(Kind.Q4_1, 700, 16)
    groups = grouped(rows, Kind.Q4_1)
    assert groups is not None
    np.testing.assert_array_equal(values_of(groups), dequantize(rows, Kind.Q4_1))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_rows_of_q_and_k_are_put_back_in_half_split_order(tmp_path: Path, kind: Kind) -> None:
    tensors = loading.llama_tensors()
    loaded = load_model(str(loading.llama_gguf(tmp_path / "m.gguf", tensors, kind=kind)))
    for canonical, name in llama.tensor_names(loaded.spec).items():
        if name not in tensors:
            continue
        stored = loaded.weights[canonical]
        expected = tensors[name]
        if expected.ndim == 2 and kind != Kind.F32:
            expected = dequantize(gguf.quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(stored.dense(), expected, err_msg=canonical)
        assert stored.dense().flags.writeable
        groups = stored.groups()
        if groups is not None:
            np.testing.assert_array_equal(values_of(groups), expected, err_msg=canonical)
    assert loaded.source == "gguf"
    assert loaded.spec.tied
    assert loaded.spec.num_tokens == loaded.tokenizer.vocab_size == loading.VOCABULARY


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.F16], ids=lambda kind: kind.name)
def test_a_range_of_rows_reads_as_in_the_whole_and_again_after_release(tmp_path: Path, kind: Kind) -> None:
    loaded = load_model(str(loading.llama_gguf(tmp_path / "m.gguf", loading.llama_tensors(), kind=kind)))
    for name in ("embed", "layers.0.q", "layers.1.down"):
        stored = loaded.weights[name]
        assert isinstance(stored, SlicedWeight)
        whole = stored.dense().copy()
        stored.release()
        part = stored.part(3, 17)
        assert part.shape == (14, stored.shape[1])
        np.testing.assert_array_equal(part.dense(), whole[3:17])
        groups = part.groups()
        assert (groups is None) == (kind == Kind.F16)
        if groups is not None:
            np.testing.assert_array_equal(values_of(groups), whole[3:17])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident pages are read from Linux' /proc")
def test_released_pages_leave_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    loading.llama_gguf(path, loading.llama_tensors(), kind=Kind.F16)

    def resident() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            if line.endswith(str(path)):
                return int(next(text for text in lines if text.startswith("Rss:")).split()[1])
        return 0

    weights = load_model(str(path)).weights
    for weight in weights.values():
        weight.dense()
    before = resident()
    for weight in weights.values():
        weight.release()  # type: ignore[attr-defined]
    assert before >= 100
    assert resident() <= before - 50


def test_interleaving_is_not_undone_where_there_is_none(tmp_path: Path) -> None:
    tensors = loading.llama_tensors()
    loaded = load_model(str(loading.llama_gguf(tmp_path / "m.gguf", tensors, architecture="qwen2")))
    assert loaded.spec.family == "qwen2"
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(loaded.weights["layers.0.q"].dense(), tensors[name])


def test_qwen3_has_norms_of_queries_and_keys(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    norms = {
        f"blk.{layer}.attn_{role}_norm.weight": random.standard_normal(loading.HEAD_DIM).astype(np.float32)
        for layer in range(loading.LAYERS)
        for role in "qk"
    }
    fields = {"attention.key_length": loading.HEAD_DIM}
    path = loading.llama_gguf(tmp_path / "m.gguf", architecture="qwen3", fields=fields, extra=norms)
    loaded = load_model(str(path))
    assert loaded.spec.qk_norm
    np.testing.assert_array_equal(loaded.weights["layers.1.k_norm"].dense(), norms["blk.1.attn_k_norm.weight"])


def test_half_split_order_inverts_the_interleaving() -> None:
    rows = np.arange(24)
    np.testing.assert_array_equal(loading.interleaved(rows, 3)[half_split_order(24, 3)], rows)
    assert not np.array_equal(half_split_order(24, 3), rows)


def test_header_becomes_a_config(tmp_path: Path) -> None:
    fields = {"attention.key_length": 16, "attention.head_count": 4, "rope.dimension_count": 16}
    config = config_of(read_gguf(loading.llama_gguf(tmp_path / "m.gguf", fields=fields)))
    spec = llama.spec_from_config(config)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert spec.rope is not None
    assert spec.rope.kind == "default"
    assert config["rms_norm_eps"] == np.float32(1e-5)


def test_yarn_and_linear_scaling_come_from_the_header(tmp_path: Path) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.attn_factor": 0.5,
    }
    spec = load_model(str(loading.llama_gguf(tmp_path / "y.gguf", fields=yarn))).spec
    assert spec.rope is not None
    assert spec.rope.kind == "yarn"
    assert spec.rope.scaling["factor"] == 4.0
    assert spec.rope.scaling["original_max_position_embeddings"] == 32
    assert spec.rope.scaling["beta_fast"] == 16.0
    assert spec.rope.scaling["attention_factor"] == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1))
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    spec = load_model(str(loading.llama_gguf(tmp_path / "l.gguf", fields=linear))).spec
    assert spec.rope is not None
    assert (spec.rope.kind, spec.rope.scaling["factor"]) == ("linear", 2.0)


def llama3_factors(factor: float, theta: float, dim: int) -> np.ndarray:
    """The table that converters write, computed wave by wave as transformers does."""
    low, high, trained = 1.0, 4.0, 8192
    table = []
    for i in range(0, dim, 2):
        wave = 2 * np.pi * theta ** (i / dim)
        smooth = (trained / wave - low) / (high - low)
        if wave < trained / high:
            table.append(1.0)
        elif wave > trained / low:
            table.append(factor)
        else:
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_llama3_scaling_is_recognised_by_its_table(tmp_path: Path) -> None:
    table = llama3_factors(8.0, 500000.0, loading.HEAD_DIM)
    assert {1.0, 8.0} < set(table.tolist())
    fields = {"rope.freq_base": 500000.0}
    path = loading.llama_gguf(tmp_path / "m.gguf", fields=fields, extra={"rope_freqs.weight": table})
    rope = load_model(str(path)).spec.rope
    assert rope is not None
    assert rope.kind == "llama3"
    assert dict(rope.scaling) == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    strange = loading.llama_gguf(tmp_path / "s.gguf", fields=fields, extra={"rope_freqs.weight": table[::-1].copy()})
    with pytest.raises(ModelError, match="rope_freqs"):
        load_model(str(strange))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba', which is not supported"),
        ({"fields": {"expert_count": 8}}, "expert_count = 8"),
        ({"fields": {"attention.head_count_kv": [2, 1]}}, "differs by layer"),
        ({"fields": {"rope.dimension_count": 8, "attention.key_length": 16}}, "rotates only a part"),
        ({"fields": {"block_count": 3}}, "lack layers.2.attn_norm"),
        ({"fields": {"embedding_length": 128}}, "shape"),
        ({"fields": {"block_count": 1 << 25}}, "claims 33554432 layers"),
        ({"fields": {"block_count": None}}, "num_hidden_layers is missing"),
        ({"fields": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}}, "longrope"),
        ({"extra": {"blk.0.ssm_a.weight": np.zeros((2, 2), np.float32)}}, "blk.0.ssm_a.weight, which no"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path: Path, options: dict, said: str) -> None:
    path = loading.llama_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ModelError, match=said) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_missing_foreign_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not found"):
        load_model(str(tmp_path / "none.gguf"))
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_model(str(tmp_path / "text.gguf"))
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(str(tmp_path / "empty.gguf"))
    whole = loading.llama_gguf(tmp_path / "m.gguf").read_bytes()
    for size in (10, 100, 2000, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"damaged|truncated"):
            load_model(str(tmp_path / "cut.gguf"))
    (tmp_path / "old.gguf").write_bytes(whole[:4] + b"\x01" + whole[5:])
    with pytest.raises(ModelError, match="version 1"):
        load_model(str(tmp_path / "old.gguf"))


def test_an_unreadable_quantisation_is_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = loading.llama_gguf(path, kind=Kind.Q8_0).read_bytes()
    name = b"blk.0.attn_v.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[at] == Kind.Q8_0
    path.write_bytes(whole[:at] + bytes([Kind.Q8_1]) + whole[at + 1 :])
    with pytest.raises(ModelError, match=r"quantisation Q8_1|truncated|damaged"):
        load_model(str(path))
    path.write_bytes(whole[:at] + bytes([250]) + whole[at + 1 :])
    with pytest.raises(ModelError, match="tensor type 250"):
        load_model(str(path))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return loading.llama_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", kind=Kind.Q8_0).read_bytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_flipped_byte_of_the_header_gets_past_as_anything_but_our_error(small: bytes, data: st.DataObject) -> None:
    header = small.index(b"output_norm.weight")
    at = data.draw(st.integers(0, header))
    value = data.draw(st.integers(0, 255))
    _load_bytes(small[:at] + bytes([value]) + small[at + 1 :])


def _load_bytes(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        with suppress(OutriderError):
            load_model(file.name)


READABLE = [kind for kind in Kind if kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_quantisation_of_the_gguf_package_is_read(tmp_path: Path, kind: Kind) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    tensors = loading.llama_tensors()
    rows = np.zeros((loading.VOCABULARY, 256 // block * size), np.uint8)
    larger = {64: 256, 32: 128}  # rows of every type's block size need 256 inputs
    wide = {name: np.zeros(tuple(larger.get(n, n) for n in t.shape), np.float32) for name, t in tensors.items()}
    path = tmp_path / "m.gguf"
    fields = {"embedding_length": 256, "attention.key_length": 64}
    loading.llama_gguf(path, wide, fields=fields, raw={"token_embd.weight": (rows, kind)})
    loaded = load_model(str(path))
    embed = loaded.weights["embed"]
    assert embed.kind == kind.name
    np.testing.assert_array_equal(embed.dense(), dequantize(rows, kind))
    groups = embed.groups()
    assert (groups is not None) == (kind in UNPACK)
