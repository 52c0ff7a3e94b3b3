"""Models of the Hugging Face hub: only the files that are needed, through huggingface_hub and its cache.

Its own variables are honoured: HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.errors import ModelError

#: config, weights, tokenizer and template; no pickles, no duplicates in other layouts.
NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def fetch_folder(repo: str, revision: str | None, token: str | None, cache_dir: Path | None) -> Path:
    """The folder of a repository's needed files. ModelError in one line where it cannot be had."""
    import huggingface_hub

    def download() -> str:
        return huggingface_hub.snapshot_download(
            repo, revision=revision, token=token, cache_dir=cache_dir, allow_patterns=list(NEEDED)
        )

    folder = _guarded(repo, revision, download)
    if not (folder / "config.json").exists():
        raise ModelError(f"{repo} has no config.json; name a .gguf file of it as {repo}/FILE.gguf, or another model")
    return folder


def fetch_file(repo: str, file: str, revision: str | None, token: str | None, cache_dir: Path | None) -> Path:
    """One file of a repository. ModelError in one line where it cannot be had."""
    import huggingface_hub

    def download() -> str:
        return huggingface_hub.hf_hub_download(repo, file, revision=revision, token=token, cache_dir=cache_dir)

    return _guarded(f"{repo}/{file}", revision, download)


def _guarded(name: str, revision: str | None, download: Callable[[], str]) -> Path:
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        return Path(download())
    except errors.GatedRepoError:
        raise ModelError(f"{name} is gated; accept its terms on the hub and give a token (HF_TOKEN)") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ModelError(
            f"{name} is neither a folder, a file nor a model on the hub; check the name, or give a token (HF_TOKEN) "
            "if it is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision}; check it on the hub") from None
    except errors.RemoteEntryNotFoundError:
        raise ModelError(f"{name} does not exist{at}; check the file's name on the hub") from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(
            f"{name}{at} is not in the local cache and the hub cannot be reached; go online once (unset "
            "HF_HUB_OFFLINE) or give a local folder"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name}{at} cannot be fetched from the hub: {reason}; try again") from None
