"""A Chromium without a window, driven through two pipes by its DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")
_DEADLINE = 60  # seconds for one answer
_OPTIONS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe
"""

# Chromium reads from descriptor 3 and writes to 4.
_START = (
    "import os, sys; a, b = map(int, sys.argv[1:3]); os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """A browser with one page; ``events`` are what it reported: messages, requests, exceptions."""

    def __init__(self, profile: Path) -> None:
        import fcntl  # which Windows lacks

        pipes = *os.pipe(), *os.pipe()
        theirs, self._out, self._in, answers = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipes)
        for end in pipes:
            os.close(end)
        options = [*_OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs), str(answers), CHROMIUM, *options],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._rest = b""
        self._last = 0
        self._page = ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._page = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        try:
            self._page = ""
            self.send("Browser.close")
            self._process.wait(10)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def send(self, method: str, **parameters: Any) -> Any:
        """Call a method and return its result; what is reported meanwhile is kept."""
        self._last += 1
        call = {"id": self._last, "method": method, "params": parameters}
        call |= {"sessionId": self._page} if self._page else {}
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _DEADLINE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise EOFError("the browser does not answer")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, path: Path, *, width: int = 1400, height: int = 1000, scheme: str = "light") -> None:
        """Open a report, and wait until it is drawn."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=path.as_uri())
        self.wait(f"location.href === {json.dumps(path.as_uri())} && document.documentElement?.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _DEADLINE
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of the page."""
        return b64decode(self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, and what is in the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    @property
    def requests(self) -> list[str]:
        """What the page asked for, itself included."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]
