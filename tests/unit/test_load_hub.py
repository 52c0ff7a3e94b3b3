"""Hub ids: which files are asked for, with what, and each failure as one line. The hub itself is a stub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

import loading
from outrider.errors import ModelError
from outrider.models.load import load_model


class Hub:
    """Stands in for huggingface_hub: records what was asked for, gives a path or raises."""

    def __init__(self, result: Path | Exception) -> None:
        self.result = result
        self.asked: list[dict[str, Any]] = []

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        return self._answer(repo_id=repo_id, **options)

    def hf_hub_download(self, repo_id: str, filename: str, **options: Any) -> str:
        return self._answer(repo_id=repo_id, filename=filename, **options)

    def _answer(self, **asked: Any) -> str:
        self.asked.append(asked)
        if isinstance(self.result, Exception):
            raise self.result
        return str(self.result)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch):
    def install(result: Path | Exception) -> Hub:
        hub = Hub(result)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
        return hub

    return install


def test_a_repository_is_loaded_like_a_folder(tmp_path: Path, stub) -> None:
    hub = stub(loading.llama_folder(tmp_path / "snapshot"))
    loaded = load_model("org/model", revision="v2", token="secret", cache_dir=tmp_path / "cache")
    assert loaded.source == "hub"
    assert loaded.path == tmp_path / "snapshot"
    (asked,) = hub.asked
    assert asked["repo_id"] == "org/model"
    assert asked["revision"] == "v2"
    assert asked["token"] == "secret"
    assert asked["cache_dir"] == tmp_path / "cache" / "hub"


def test_only_needed_files_are_asked_for(tmp_path: Path, stub) -> None:
    hub = stub(loading.llama_folder(tmp_path / "snapshot"))
    load_model("org/model")
    patterns = hub.asked[0]["allow_patterns"]
    repository = {
        "config.json": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "tokenizer.json": True,
        "chat_template.jinja": True,
        "generation_config.json": True,
        "pytorch_model.bin": False,
        "original/consolidated.00.pth": False,
        "consolidated.safetensors": False,
        "onnx/model.onnx": False,
        "model.Q4_K_M.gguf": False,
        "README.md": False,
    }
    wanted = set(huggingface_hub.utils.filter_repo_objects(repository, allow_patterns=patterns))
    assert wanted == {name for name, needed in repository.items() if needed}
    assert hub.asked[0]["cache_dir"] is None, "the hub's own cache, and its own variables, are used"


def test_one_gguf_of_a_repository(tmp_path: Path, stub) -> None:
    hub = stub(loading.llama_gguf(tmp_path / "m.gguf"))
    loaded = load_model("org/model-GGUF/sub/m.gguf", revision="main")
    assert (loaded.source, loaded.path) == ("hub", tmp_path / "m.gguf")
    assert hub.asked[0]["repo_id"] == "org/model-GGUF"
    assert hub.asked[0]["filename"] == "sub/m.gguf"


def test_a_repository_of_gguf_files_only(tmp_path: Path, stub) -> None:
    (tmp_path / "snapshot").mkdir()
    stub(tmp_path / "snapshot")
    with pytest.raises(ModelError, match=r"name a \.gguf file of it as org/model/FILE\.gguf"):
        load_model("org/model")


def answer(kind: type[Exception]) -> Exception:
    """One of the hub's errors, several lines long as they are."""
    response = SimpleNamespace(status_code=404, headers={}, request=None)
    try:
        return kind("first line\n\nsecond line", response=response)
    except TypeError:
        return kind("first line\n\nsecond line")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.RepositoryNotFoundError, "neither a folder, a file nor a model on the hub"),
        (errors.GatedRepoError, "org/model is gated"),
        (errors.RevisionNotFoundError, "no revision v9"),
        (errors.LocalEntryNotFoundError, "not in the local cache"),
        (errors.HfHubHTTPError, "cannot be fetched from the hub: first line; try again"),
        (errors.OfflineModeIsEnabled, "cannot be fetched from the hub: first line"),
        (ConnectionError, "cannot be fetched from the hub: first line"),
        (TimeoutError, "cannot be fetched from the hub: first line"),
    ],
)
def test_failures_are_one_line(stub, error: type[Exception], said: str) -> None:
    stub(answer(error))
    with pytest.raises(ModelError, match=said) as caught:
        load_model("org/model", revision="v9")
    assert "\n" not in str(caught.value)


def test_offline_without_the_model_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the local cache and the hub cannot be reached"):
        load_model("org/model", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135", "./org/model", "~/org", "", "a b", "x" * 5000, "org/model.gguf"])
def test_what_is_no_model_is_not_looked_up(stub, name: str) -> None:
    hub = stub(AssertionError("was looked up"))
    with pytest.raises(ModelError, match="is not found"):
        load_model(name)
    assert hub.asked == []


def test_a_near_alias_is_suggested(stub) -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m\?"):
        load_model("smollm-135m")
