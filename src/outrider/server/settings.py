"""The server's own settings. A later source wins: defaults < TOML file < environment (OUTRIDER_*) < flags.

Unknown keys are refused by name. An environment variable OUTRIDER_X sets X; variables that merely begin alike belong to
other parts and are left alone, unless they look like a misspelt setting.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outrider.errors import ConfigError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

PREFIX = "OUTRIDER_"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Settings(BaseModel):
    """Everything about serving that is not about the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="address to listen on; loopback unless you say otherwise")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    metrics_port: int | None = Field(default=None, ge=0, le=65535, description="serve /metrics on this port instead")
    served_model_name: list[str] = Field(
        default=[], description="names that clients may ask for; default: the model's own"
    )
    api_key: list[str] = Field(
        default=[], description="keys that are accepted as `Authorization: Bearer KEY`; none: no check"
    )
    api_key_file: Path | None = Field(default=None, description="file with one key a line; # begins a comment")
    allowed_hosts: list[str] = Field(
        default=[], description="accepted Host headers; default: loopback names when on loopback"
    )
    cors_origins: list[str] = Field(default=[], description="origins that browsers may call from; none: CORS is off")
    web_page: bool = Field(default=True, description="serve the chat page at /")

    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="bytes of a request body")
    max_json_depth: int = Field(default=64, ge=4, description="levels of nesting in a request body")
    max_queue: int = Field(
        default=256, ge=1, description="samples in flight, running and waiting; more are answered 429"
    )
    rate_limit: float | None = Field(
        default=None, gt=0, description="requests a minute for each key or address; none: no limit"
    )
    max_n: int = Field(default=16, ge=1, le=128, description="samples of one request")
    max_prompts: int = Field(default=64, ge=1, description="prompts of one completion request")
    max_stop: int = Field(default=16, ge=1, description="stop strings of one request")
    max_logit_bias: int = Field(default=1024, ge=1, description="entries of logit_bias and of token id lists")
    max_grammar_bytes: int = Field(default=65536, ge=64, description="bytes of a JSON schema, regex or grammar")

    read_timeout: float = Field(
        default=30.0, gt=0, description="seconds in which a request's headers, and its body, must arrive"
    )
    write_timeout: float = Field(default=60.0, gt=0, description="seconds a client may leave a streamed answer unread")
    request_timeout: float = Field(default=1800.0, gt=0, description="seconds one request may take")
    drain_timeout: float = Field(
        default=30.0, ge=0, description="seconds that running requests may finish in after SIGTERM"
    )
    stream_interval: float = Field(
        default=0.02, ge=0, le=1, description="seconds for which tokens of streams may gather; 0 sends every step's"
    )
    heartbeat: float = Field(default=15.0, gt=0, description="seconds of silence after which a stream sends a comment")

    reasoning_parser: Literal["auto", "none"] = Field(
        default="auto", description="split <think> text into reasoning_content"
    )
    tool_parser: Literal["auto", "none"] = Field(default="auto", description="turn <tool_call> JSON into tool calls")
    log_prompts: bool = Field(default=False, description="write prompts and answers to the log")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    otlp_endpoint: str | None = Field(
        default=None, description="send OpenTelemetry spans there; needs outrider[tracing]"
    )

    @field_validator("served_model_name", "api_key", "allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Environment variables hold lists as comma-separated text."""
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted Host headers without the port; empty accepts all. Guards loopback against DNS rebinding."""
        return tuple(self.allowed_hosts) or (LOOPBACK_NAMES if self.is_loopback else ())

    def keys(self) -> tuple[bytes, ...]:
        """All accepted API keys, of the list and of the file."""
        keys = list(self.api_key)
        if self.api_key_file is not None:
            keys += _read_keys(self.api_key_file)
        return tuple(key.encode() for key in keys)


def gather(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any], others: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the sources and part the server's own keys from `others`; flags that are None were not given.

    Raises ConfigError that names an unknown key and the nearest known one.
    """
    known = [*Settings.model_fields, *others]
    values = read_toml(file) if file else {}
    values |= from_environment(environment, known)
    values |= {key: value for key, value in flags.items() if value is not None}
    for key in values:
        if key not in known:
            raise ConfigError.unknown(key, known, "the configuration")
    own = {key: value for key, value in values.items() if key in Settings.model_fields}
    return own, {key: value for key, value in values.items() if key not in own}


def build(values: Mapping[str, Any]) -> Settings:
    """Settings of plain values; raises ConfigError for those out of range."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise ConfigError(f"{field} = {first['input']!r} is refused: {first['msg'].lower()}", field) from None


def read_toml(file: Path) -> dict[str, Any]:
    """Keys of a TOML file."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}", "config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", "config") from None


def from_environment(environment: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """The known keys among OUTRIDER_* variables; a near miss of a known key is an error."""
    found = {}
    for name, value in environment.items():
        if not name.startswith(PREFIX):
            continue
        key = name[len(PREFIX) :].lower()
        if key in known:
            found[key] = value
        elif get_close_matches(key, known, n=1, cutoff=0.75):
            raise ConfigError.unknown(key, known, f"the environment ({name})")
    return found


def _read_keys(file: Path) -> list[str]:
    """The keys of a file, one a line."""
    try:
        lines = [line.split("#")[0].strip() for line in file.read_text("utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"cannot read the key file {file}: {error.strerror}", "api_key_file") from None
    keys = [line for line in lines if line]
    if not keys:
        raise ConfigError(f"the key file {file} holds no key; write one a line", "api_key_file")
    return keys
