"""The web page: its headers, its size, and the page itself in a headless browser."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import BROWSER, DRIVER, Browser, browser
from live import Live, live, wait_for
from stub import StubBackend

from loading import repeating_folder
from outrider.api.service import Service
from outrider.server.app import STATIC

needs_browser = pytest.mark.skipif(not (DRIVER and BROWSER), reason="chromium and chromedriver are not installed")
SHOTS = os.environ.get("OUTRIDER_SCREENSHOTS")  # a folder, to look at what the tests saw


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[Live]:
    with live(StubBackend(delay=0.01)) as running:
        yield running


def shoot(window: Browser, name: str) -> None:
    if SHOTS:
        window.shot(Path(SHOTS) / f"{name}.png")


def say(window: Browser, text: str) -> None:
    window.type("#text", text + "\ue007")  # the Enter key


def test_nothing_comes_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        text = file.read_text("utf-8")
        assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", text), file.name
        assert len(text) < 16_000
    html = (STATIC / "page.html").read_text("utf-8")
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", html)


def test_the_content_policy_is_strict(server: Live) -> None:
    with server.http() as http:
        for path, kind in {
            "/": "text/html",
            "/static/page.css": "text/css",
            "/static/page.js": "text/javascript",
        }.items():
            headers = http.get(path).headers
            assert headers["content-type"].startswith(kind)
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"


def test_the_page_can_be_left_out() -> None:
    with live(StubBackend(), web_page=False) as server:
        assert server.http().get("/").status_code == 404


@needs_browser
def test_a_chat_streams_and_tints(window: Browser, server: Live) -> None:
    window.resize(1200, 800)
    window.dark(False)
    window.open(server.url)
    say(window, "say:Hello wörld, <b>this</b> is drafted.")
    window.wait("return document.querySelector('#messages li.assistant .note')")
    assert window.text("#messages li.user") == "say:Hello wörld, <b>this</b> is drafted."
    assert window.text("#messages li.assistant").startswith("Hello wörld, <b>this</b> is drafted.")
    assert "tokens/s" in window.text("#messages .note")
    tinted = window.run("return [...document.querySelectorAll('#messages .d0')].map(e => e.textContent).join('|')")
    assert tinted.startswith("Hel|o w")
    assert window.run("return document.querySelector('#messages .d0').title") == "drafted by ngram"
    colour = "return getComputedStyle(document.querySelector('#messages .d0')).backgroundColor"
    assert window.run(colour) == "rgb(207, 230, 255)"
    window.run("document.querySelector('#options').open = true")
    window.click("#tint")
    assert window.run(colour) == "rgba(0, 0, 0, 0)"
    window.click("#tint")
    window.wait("return document.querySelector('#drafters td')?.textContent === 'ngram'")
    assert window.text("#acceptance") == "4.00"
    context = window.text("#context")
    assert all(t in context for t in ("budget 6425 %", "capturedabout 80 %", "overlap90 %")), context
    assert window.text("#drafters tr") == "ngram75 %4.000.75"
    shoot(window, "light")
    assert window.log() == []


@needs_browser
def test_the_panel_tells_what_the_engine_counts(window: Browser, tmp_path: Path) -> None:
    """A real engine that drafts and reads sparsely: every figure on the page is one of its own."""
    folder = repeating_folder(tmp_path / "tiny", positions=1024)
    drafters = {"drafters": ["ngram", "suffix"], "num_speculative_tokens": 4, "vote": "hedge"}
    context = {"mode": "sparse", "budget": 64, "window": 16}
    service = Service(folder, speculative_config=drafters, context_config=context, max_model_len=1024)
    with live(service) as server:
        window.open(server.url)
        window.log()  # forgets what the page before said when its server had gone
        window.run("document.querySelector('#max-tokens').value = 96")
        say(window, "the river runs past the mill " * 8)
        window.wait("return document.querySelector('#messages li.assistant .note')")
        window.wait("return document.querySelector('#running').textContent === '0 / 0'")
        told, now = service.stats()["context"], server.http().get("/stats").json()["engine"]
        assert told["sparse_steps"] > 0
        shares = {"Read, sparse, budget 64": told["read_entries"] / told["known_entries"]}
        shares |= {"Attention capturedabout ": told["captured"], "Selection overlap": told["overlap"]}
        expected = "".join(f"{name}{percent(share)} %" for name, share in shares.items())
        wait_for(lambda: window.text("#context") == expected)  # the panel asks once a second
        rows = [(d["name"], d["accepted_tokens"], d["draft_tokens"], d["weight"]) for d in now["drafters"]]
        shown = window.run("return [...document.querySelectorAll('#drafters tr')].map(r => r.innerText.split('\\t'))")
        assert [(row[0], row[3]) for row in shown] == [(name, f"{weight:.2f}") for name, _, _, weight in rows]
        assert [row[1] for row in shown] == [f"{percent(a / d)} %" if d else "–" for _, a, d, _ in rows]
        assert sum(accepted for _, accepted, _, _ in rows) > 0
        bars = window.run("return [...document.querySelectorAll('#lengths div')].map(e => e.title)")
        assert bars == [f"{count} drafts of {length}" for length, count in now["lengths"].items()]
        assert f"of {now['kv_pages_total']}" in window.text("#memory")
        assert window.run("return document.querySelector('#budget').placeholder") == "64"
        assert window.log() == []


def percent(share: float) -> int:
    """As JavaScript rounds."""
    return int(100 * share + 0.5)


@needs_browser
def test_the_next_turn_sends_the_conversation(window: Browser, server: Live) -> None:
    window.open(server.url)
    say(window, "say:one")
    window.wait("return document.querySelectorAll('#messages .note').length === 1")
    say(window, "say:two")
    window.wait("return document.querySelectorAll('#messages .note').length === 2")
    text = server.backend.tokenizer.decode(server.backend.seen[1][0])
    assert text == "user\nsay:oneassistant\noneuser\nsay:twoassistant\n"
    window.click("#clear")
    assert window.text("#messages") == ""


@needs_browser
def test_stop_frees_the_engine_and_options_are_sent(window: Browser) -> None:
    with live(StubBackend(delay=0.05)) as server:
        window.open(server.url)
        window.run("document.querySelector('#options').open = true")
        window.click("#speculative")
        window.type("#budget", "64")
        say(window, "say:" + "long " * 100)
        window.wait("return document.querySelectorAll('#messages .assistant span').length > 2")
        assert server.backend.open == 1
        window.click("#stop")
        wait_for(lambda: server.backend.open == 0, 1.0)
        window.wait("return document.querySelector('#messages .note')?.textContent.includes('stopped')")
        assert server.backend.seen[0][1].extra_args == {"speculative": False, "context_budget": 64}
        assert window.run("return document.querySelectorAll('#messages .d0').length") == 0


@needs_browser
def test_a_key_is_asked_for_and_used(window: Browser) -> None:
    with live(StubBackend(), api_key=["sesame"]) as server:
        window.open(server.url)
        window.wait("return document.querySelector('#model').textContent.includes('API key')")
        assert window.run("return document.querySelector('#options').open")
        window.type("#key", "sesame\t")
        window.wait("return document.querySelector('#model').textContent === 'stub'")
        say(window, "say:open")
        window.wait("return document.querySelector('#messages .note')")
        assert window.text("#messages .assistant").startswith("open")


@needs_browser
def test_errors_are_shown(window: Browser, server: Live) -> None:
    server.backend.fail_after = 1
    window.open(server.url)
    say(window, "say:this will break")
    window.wait("return document.querySelector('#messages .error')")
    assert "it broke" in window.text("#messages .error")


@needs_browser
def test_a_phone_in_the_dark(window: Browser, server: Live) -> None:
    window.resize(390, 780)
    window.dark(True)
    window.open(server.url)
    say(window, "say:" + "On a phone the text wraps and nothing sticks out. " * 3)
    window.wait("return document.querySelector('#messages .note')")
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert window.run("return getComputedStyle(document.body).backgroundColor") == "rgb(22, 21, 18)"
    shoot(window, "phone")
    assert window.run("return getComputedStyle(document.querySelector('#panel')).display") == "none"
    window.click("#panel-button")
    assert window.run("return getComputedStyle(document.querySelector('#panel')).display") == "block"
    assert window.run("return document.querySelector('#panel-button').getAttribute('aria-expanded')") == "true"
    shoot(window, "phone-panel")
    small = """return [...document.querySelectorAll('button:not([hidden])')]
        .filter(b => b.offsetHeight && b.offsetHeight < 40).length"""
    assert window.run(small) == 0
    window.resize(1200, 800)
    window.dark(False)


@needs_browser
def test_everything_has_a_name_and_can_be_reached_by_keyboard(window: Browser, server: Live) -> None:
    window.open(server.url)
    unnamed = """return [...document.querySelectorAll('input, textarea, button')]
        .filter(e => !(e.labels?.length || e.textContent.trim())).map(e => e.id)"""
    assert window.run(unnamed) == []
    assert window.run("return document.activeElement.id") == "text"
    assert window.run("return [...document.querySelectorAll('[tabindex]')].every(e => e.tabIndex === 0)")
