"""Tokenizers of folders and GGUF files against transformers' own, on tokenizers made here and on the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import loading
from outrider.errors import ModelError
from outrider.models.load import Tokenizer as Ours
from outrider.models.load import load_model
from outrider.models.load.gguf_file import read_gguf
from outrider.models.load.gguf_tokenizer import LLAMA3, QWEN2, WORDS, gguf_tokenizer
from outrider.models.load.tokenizer_files import folder_tokenizer

TEXTS = [
    *loading.CORPUS[:3],
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\r\nnewlines\n\n\n end",
    "IT'S they'LL we've 12345 3.14",
    "你好，世界！ αβγ 🙂‍↔️ e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "\u00a0odd\u2003spaces\u200b",
]
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Où est l'été?"},
    {"role": "assistant", "content": "Ici."},
    {"role": "user", "content": "1234"},
]


def same(ours: Ours, theirs: PreTrainedTokenizerFast, controls_as_text: bool = False) -> None:
    """Both encode and decode every text alike."""
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=controls_as_text)
        assert ours.encode(text, allow_special=not controls_as_text) == expected, text
        assert ours.encode(text, add_special=True, allow_special=True) == theirs.encode(text), text
        for skip in (True, False):
            decoded = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(expected, skip_special=skip) == decoded, text
    assert any(len(ours.encode(text)) > 5 for text in TEXTS)


def saved(folder: Path, backend: Tokenizer, **settings: object) -> tuple[Ours, PreTrainedTokenizerFast]:
    PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(folder)
    return folder_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_byte_level_folder(tmp_path: Path) -> None:
    ours, theirs = saved(
        tmp_path,
        loading.byte_level_tokenizer(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=loading.CHAT,
    )
    same(ours, theirs)
    same(ours, theirs, controls_as_text=True)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
        assert ours.chat(MESSAGES, add_generation_prompt=prompt) == expected


def test_templates_are_found_where_transformers_puts_them(tmp_path: Path) -> None:
    ours, _ = saved(tmp_path, loading.byte_level_tokenizer(), chat_template=loading.CHAT)
    assert (tmp_path / "chat_template.jinja").exists()
    assert ours.chat_template == loading.CHAT
    (tmp_path / "chat_template.jinja").unlink()
    assert not folder_tokenizer(tmp_path).has_chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert folder_tokenizer(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.json").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    both = folder_tokenizer(tmp_path)
    assert both.decode(both.chat([])) == "plain"
    assert both.decode(both.chat([], tools=[{"name": "f"}])) == "tools"


def metaspace_tokenizer() -> Tokenizer:
    """Llama-2's kind: BPE over ▁ words with bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, limit_alphabet=60)
    tokenizer.train_from_iterator(loading.CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def test_sentencepiece_folder(tmp_path: Path) -> None:
    ours, theirs = saved(tmp_path, metaspace_tokenizer(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    same(ours, theirs)


def test_gpt2_files_as_opt_has_them(tmp_path: Path) -> None:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator(loading.CORPUS, trainer)
    plain.model.save(str(tmp_path))
    settings = {
        "add_bos_token": True,
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = folder_tokenizer(tmp_path)
    end = plain.token_to_id("</s>")
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text).ids
        assert ours.encode(text, add_special=True) == [end, *plain.encode(text).ids]
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_ids == (end,)


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    loading.byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    entry = {"content": "<tool>", "special": False, "normalized": False, "lstrip": False, "rstrip": False}
    settings = {"added_tokens_decoder": {str(loading.VOCABULARY): entry}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = folder_tokenizer(tmp_path)
    assert ours.encode("a<tool>")[-1] == loading.VOCABULARY
    assert not ours.is_special(loading.VOCABULARY)


def test_only_a_sentencepiece_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"save its tokenizer\.json with transformers"):
        folder_tokenizer(tmp_path)


def gguf_of(path: Path, write) -> Ours:
    """The tokenizer of a GGUF that holds nothing else."""
    writer = GGUFWriter(path, "llama")
    write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_tokenizer(read_gguf(path))


@pytest.mark.parametrize(
    ("pre", "pattern"), [("smollm", None), ("qwen2", QWEN2), ("llama-bpe", LLAMA3), ("gpt-2", "gpt2")]
)
def test_byte_level_gguf(tmp_path: Path, pre: str, pattern: str | None) -> None:
    backend = loading.byte_level_tokenizer()
    if pattern == "gpt2":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pattern:
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    if pre == "llama-bpe":
        backend.model.ignore_merges = True
    ours = gguf_of(tmp_path / "t.gguf", lambda writer: loading.add_byte_level(writer, backend, pre, padding=7))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    same(ours, theirs)
    same(ours, theirs, controls_as_text=True)
    assert ours.vocab_size == loading.VOCABULARY, "padding is no token"
    assert ours.eos_token_ids == (2, 0)
    assert ours.has_chat_template


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_way_of_cutting_words_loses_nothing(tmp_path: Path, name: str) -> None:
    backend = loading.byte_level_tokenizer()
    ours = gguf_of(tmp_path / "t.gguf", lambda writer: loading.add_byte_level(writer, backend, name))
    for text in TEXTS:
        if text.isascii():
            assert ours.decode(ours.encode(text)) == text


def test_sentencepiece_gguf(tmp_path: Path) -> None:
    backend = metaspace_tokenizer()
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    rank = {left + right: i for i, (left, right) in reversed(list(enumerate(merges)))}
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(rank.get(piece, 10**6)) for piece in pieces])
        types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    ours = gguf_of(tmp_path / "t.gguf", write)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == expected, text
        assert ours.encode(text, add_special=True) == [1, *expected]
        assert ours.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False)
    assert ours.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: (w.add_tokenizer_model("t5"), w.add_token_list(["a"])), "kind 't5', which is not supported"),
        (lambda w: w.add_tokenizer_model("gpt2"), "kind 'gpt2'"),
        (lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"])), "without scores"),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("bloom"), w.add_token_list(["a"])),
            "words by 'bloom'",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"]), w.add_token_merges(["x y"])),
            "merges that do not fit",
        ),
    ],
)
def test_tokenizers_of_other_kinds_are_refused(tmp_path: Path, change, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        gguf_of(tmp_path / "t.gguf", change)


def test_user_defined_tokens_stay_whole_and_are_text(tmp_path: Path) -> None:
    backend = loading.byte_level_tokenizer()
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])

    def write(writer: GGUFWriter) -> None:
        loading.add_byte_level(writer, backend)
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[loading.VOCABULARY] = 4

    ours = gguf_of(tmp_path / "t.gguf", write)
    assert ours.encode("<tool_call>") == [loading.VOCABULARY]
    assert ours.decode([loading.VOCABULARY]) == "<tool_call>"


@pytest.mark.model
def test_the_default_model_has_known_encodings() -> None:
    tokenizer = load_model("smollm2-135m").tokenizer
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("x = 123") == [104, 446, 216, 33, 34, 35]
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_the_default_model_agrees_with_transformers() -> None:
    loaded = load_model("smollm2-135m")
    theirs = AutoTokenizer.from_pretrained(loaded.path.parent, gguf_file=loaded.path.name)
    for text in TEXTS:
        assert loaded.tokenizer.encode(text, allow_special=True) == theirs.encode(text, add_special_tokens=False)
