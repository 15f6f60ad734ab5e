"""A real browser without a window, told what to do over a pipe (Chrome DevTools Protocol)."""

import base64
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.conftest import load_recipe

OWN = Path(sys.prefix) / "browser"  # where `make test` puts one
FLAGS = (
    "--headless",
    "--no-sandbox",  # the page is our own, and containers often allow none
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
PATIENCE = 60  # seconds without a word from the browser
# The browser reads commands from file descriptor 3 and answers on 4.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a browser; what went wrong in it and what it asked the network for is kept."""

    def __init__(self, executable: str, profile: Path) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        starter = [sys.executable, "-c", START, str(read_commands), str(write_answers)]
        self._process = subprocess.Popen(
            [*starter, executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_commands, write_answers),
            env={**os.environ, "LD_LIBRARY_PATH": f"{OWN}/lib", "FONTCONFIG_PATH": str(OWN)}
            if executable.startswith(str(OWN))
            else None,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """The browser's answer to one command."""
        self._number += 1
        command: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._receive()).get("id") != self._number:
            self._hear(message)
        assert "error" not in message, message["error"]
        return dict(message["result"])

    def open(self, path: Path) -> None:
        """Loads a file and waits until it has loaded."""
        self.complaints.clear()
        self.requests.clear()
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._hear(self._receive())

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        outcome = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in outcome, outcome["exceptionDetails"]
        return outcome["result"].get("value")

    def press(self, key: str) -> None:
        """A key on the keyboard, whose code is its name."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        codes |= {"PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
            )  # fmt: skip

    def click(self, selector: str) -> None:
        """The mouse on the middle of the first element that the selector finds."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, *, height: int = 900, scheme: str = "light") -> None:
        """Another window, and what its owner prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            piece = os.read(self._answers, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError(f"the browser says nothing: {self._process.poll()}")
            self._received += piece
        text, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(text))

    def _hear(self, message: dict[str, Any]) -> None:
        method = message.get("method", "")
        self._events.append(method)
        parameters = message.get("params", {})
        if method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(parameters))
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser of this machine; without one the test is skipped."""
    found: str | None = load_recipe("get_browser").found(OWN)
    if found is None or os.name != "posix":
        pytest.skip("no browser: install Chromium or Chrome, or run `make browser`")
    browser = Browser(found, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
