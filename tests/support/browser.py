"""A headless Chromium driven over its pipe by the DevTools protocol: no driver and no package is needed.

``--remote-debugging-pipe`` takes commands as JSON on file descriptor 3 and answers on 4, each ended by a zero byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
    "--disable-dev-shm-usage",
)  # fmt: skip


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def opened(seconds: float = 120) -> Iterator[Page]:
    """Start a browser with one empty page, and end it. Each command has this many seconds at most."""
    command = find()
    assert command is not None
    ours, theirs = _pipe(), _pipe()  # each (read, write): what it sends, and what it gets
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$0" "$@" 3<&{theirs[0]} 4>&{ours[1]}',
                command,
                *_FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(theirs[0], ours[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs[0])
        os.close(ours[1])
        try:
            yield Page(ours[0], theirs[1], seconds)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours[0])
            os.close(theirs[1])


def _pipe() -> tuple[int, int]:
    """Return a pipe with numbers above those that the shell changes, 3 and 4."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return read, write


class Page:
    """One page of the browser.

    Attributes:
        errors: uncaught exceptions of scripts, as text.
    """

    def __init__(self, read: int, write: int, seconds: float) -> None:
        self._read, self._write, self._seconds = read, write, seconds
        self._buffer, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._notice(answer)

    def wait_for(self, event: str) -> None:
        """Wait for an event."""
        while True:
            message = self._next()
            self._notice(message)
            if message.get("method") == event:
                return

    def _notice(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            details = message["params"]["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + self._seconds
        while b"\0" not in self._buffer:
            ready = select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"the browser did not answer in {self._seconds} seconds"
            part = os.read(self._read, 2**20)
            assert part, "the browser ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, file: pathlib.Path, fragment: str = "") -> None:
        """Open a file, by its path alone: there is no server."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=file.resolve().as_uri() + fragment)
        self.wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return the value of a script, which may be a promise."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]["exception"]["description"]
        return result["result"].get("value")

    def size(self, width: int, height: int) -> None:
        """Set the size of the window; up to 500 wide, as a phone."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width <= 500
        )
