"""Headless Chromium through its WebDriver, which is JSON over HTTP: no test dependency beyond the browser."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One browser window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._base = http, f"/session/{session}"

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def type(self, selector: str, text: str) -> None:
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._call("POST", f"/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self._call("POST", f"/element/{element}/click", {})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def resize(self, width: int, height: int) -> None:
        """The size of the page itself: windows have a least width."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def log(self) -> list[str]:
        """Messages of the console, refusals of the content policy among them."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def shot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def wait(self, script: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"waited in vain for {script}"
            time.sleep(0.02)

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._http.request(method, self._base + path, json=body)
        assert response.is_success, response.text[:500]
        return response.json()["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A fresh headless browser."""
    assert DRIVER is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,800"]
    options = {"binary": BROWSER, "args": arguments}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _until_ready(http)
            made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            session = made.json()["value"]["sessionId"]
            yield Browser(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)


def _until_ready(http: httpx.Client) -> None:
    for _ in range(500):
        try:
            if http.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError("the browser's driver did not start")
