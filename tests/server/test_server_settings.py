"""Settings of file, environment and flags; and `outrider serve` up to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub import StubBackend

from outrider.cli import serve as command
from outrider.cli.main import main
from outrider.errors import ConfigError
from outrider.server import run as server_run
from outrider.server.app import create_app
from outrider.server.settings import Settings, build, gather
from outrider.server.tracing import NoTracer, OpenTelemetryTracer, make_tracer


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("port = 1\nmax_queue = 1\nrate_limit = 1.5\nmodel = 'm'\n[speculative_config]\nvote = 'hedge'\n")
    environment = {"OUTRIDER_MAX_QUEUE": "2", "OUTRIDER_RATE_LIMIT": "2.5", "OUTRIDER_DATA": "/elsewhere", "HOME": "/"}
    own, others = gather(file, environment, {"rate_limit": 3.5, "host": None}, command.ENGINE)
    settings = build(own)
    assert (settings.port, settings.max_queue, settings.rate_limit, settings.host) == (1, 2, 3.5, "127.0.0.1")
    assert others == {"model": "m", "speculative_config": {"vote": "hedge"}}


def test_lists_in_the_environment_are_comma_separated() -> None:
    own, _ = gather(None, {"OUTRIDER_API_KEY": "a, b,", "OUTRIDER_WEB_PAGE": "false"}, {})
    settings = build(own)
    assert settings.keys() == (b"a", b"b")
    assert settings.web_page is False


@pytest.mark.parametrize(
    ("file", "environment", "flags", "message"),
    [
        ("prot = 1", {}, {}, "did you mean 'port'"),
        ("port = ", {}, {}, "not valid TOML"),
        ("", {"OUTRIDER_PROT": "1"}, {}, "did you mean 'port'"),
        ("", {}, {"nonsense": "1"}, "unknown option 'nonsense'"),
        ("port = 70000", {}, {}, "port = 70000 is refused"),
        ("rate_limit = 0", {}, {}, "rate_limit"),
        ("tool_parser = 'magic'", {}, {}, "tool_parser"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, file: str, environment: Any, flags: Any, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(file)
    with pytest.raises(ConfigError, match=message):
        build(gather(path, environment, flags, command.ENGINE)[0])


def test_key_files_must_hold_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the key file"):
        Settings(api_key_file=tmp_path / "none").keys()
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        create_app(StubBackend(), Settings(api_key_file=tmp_path / "empty"))


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)]
)
def test_loopback_accepts_loopback_names_only(host: str, loopback: bool) -> None:
    assert bool(Settings(host=host).hosts) == loopback
    assert Settings(host=host, allowed_hosts=["x.example"]).hosts == ("x.example",)


def test_a_taken_port_is_told_before_the_model_is_loaded() -> None:
    taken = server_run.bind("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match="choose another port"):
        server_run.serve(lambda: pytest.fail("loaded"), Settings(port=port, log_level="error"))
    taken.close()


def test_the_command_hands_everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(command, "open_service", lambda model, options: seen.update(model=model, options=options))
    monkeypatch.setattr("outrider.server.serve", lambda factory, settings: seen.update(settings=settings) or factory())
    (tmp_path / "tiny.gguf").write_text("")
    given = ["serve", str(tmp_path / "tiny.gguf"), "--port", "0", "--api-key", "a", "--api-key", "b", "--seed", "7"]
    given += ["--max-model-len", "64", "--kv-memory", "1MiB", "--speculative-config", "off", "--set", "max-queue=3"]
    given += ["--set", "stream-interval=0.5"]
    given += ["--context-config", '{"mode": "sparse"}', "--dtype", "float32", "--max-num-seqs", "2"]
    assert main(given) == 0
    assert seen["settings"].keys() == (b"a", b"b")
    assert (seen["settings"].max_queue, seen["settings"].served_model_name) == (3, ["tiny"])
    assert seen["options"] == {
        "seed": 7,
        "pace": 0.5,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "kv_memory": 1 << 20,
        "dtype": "float32",
        "speculative_config": None,
        "context_config": {"mode": "sparse"},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "name a model"),
        (["m", "--set", "max_queue"], "--set KEY=VALUE"),
        (["m", "--set", "max_queu=1"], "did you mean 'max_queue'"),
        (["m", "--speculative-config", "{"], "not JSON"),
        (["m", "--set", "threads=many"], "whole number"),
    ],
)
def test_wrong_usage_is_one_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_traces_unless_asked_for() -> None:
    assert isinstance(make_tracer(None), NoTracer)


def test_traces_need_their_packages() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="checked where the tracing extra is installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    record: dict[str, Any] = {"status": 200, "prompt": "secret"}
    with OpenTelemetryTracer(provider).span("POST /v1/completions", {"traceparent": parent}, record):
        record["completion_tokens"] = 5
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes or {}) == {"outrider.status": 200, "outrider.completion_tokens": 5}
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
