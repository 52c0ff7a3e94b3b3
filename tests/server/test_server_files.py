"""Examples run against a server, and what is deployed agrees with what exists."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live import live
from stub import StubBackend

from outrider.cli.serve import ENGINE
from outrider.server.settings import Settings, build, gather

ROOT = Path(__file__).parents[2]
EXAMPLES, DEPLOY = ROOT / "examples" / "server", ROOT / "deploy"


def run(command: list[str], url: str) -> str:
    environment = {**os.environ, "OUTRIDER_URL": url, "OUTRIDER_KEY": "k", "OUTRIDER_NAME": "stub"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_example() -> None:
    with live(StubBackend(), api_key=["k"]) as server:
        out = run([sys.executable, str(EXAMPLES / "openai_client.py")], server.url)
    assert out.startswith("You said: Name three rivers.\n")
    assert "of them drafted" in out


def test_the_langchain_example() -> None:
    pytest.importorskip("langchain_openai", reason="LangChain is not installed")
    with live(StubBackend(), api_key=["k"]) as server:
        assert "Name three rivers." in run([sys.executable, str(EXAMPLES / "langchain_client.py")], server.url)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_curl_example() -> None:
    with live(StubBackend(), api_key=["k"]) as server:
        out = run(["bash", str(EXAMPLES / "curl.sh")], server.url)
    assert '"status":"ready"' in out
    assert "data: [DONE]" in out
    assert "spec_decode_num_accepted_tokens_total" in out


def test_the_configuration_example() -> None:
    own, others = gather(EXAMPLES / "outrider.toml", {}, {}, ENGINE)
    assert build(own).max_queue == 128
    assert others["speculative_config"]["drafters"] == ["ngram"]


def test_the_dashboard_shows_metrics_that_exist_and_misses_none() -> None:
    with live(StubBackend()) as server:
        server.openai().completions.create(model="stub", prompt="say:hello")
        server.http().post("/v1/completions", json={})
        exposed = set(re.findall(r"^(outrider:\w+)", server.http().get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    used = set(re.findall(r"outrider:\w+", json.dumps(dashboard)))
    assert used <= exposed
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed if not name.endswith("_created")}
    shown = {re.sub(r"_bucket$", "", name) for name in used}
    assert families - shown <= {"outrider:engine_steps_total", "outrider:spec_decode_acceptance_length"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_unit_gives_the_drain_its_time() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / "outrider.service")
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) > Settings().drain_timeout + 5
    assert "outrider serve --config" in service["ExecStart"]


def test_the_container_names_real_settings() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    names = {name.lower() for name in re.findall(r"OUTRIDER_(\w+)=", text)}
    assert names <= set(Settings.model_fields) | set(ENGINE)


def test_the_page_of_settings_names_every_setting_with_its_default() -> None:
    text = (ROOT / "docs" / "server.md").read_text("utf-8")
    for name, setting in Settings.model_fields.items():
        row = re.search(rf"^\| `{name}` \| (.*?) \| (.*) \|$", text, re.MULTILINE)
        assert row, f"docs/server.md lacks {name}"
        assert row[2] == setting.description
        assert row[1] == f"`{json.dumps(setting.default)}`"
