"""A Chromium without a window, spoken to by its DevTools protocol through two pipes."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# The browser reads from 3 and writes to 4, whichever numbers the pipes have here.
_AS_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One browser with one page; a context manager.

    Args:
        timeout_s: Seconds that any answer may take.
    """

    def __init__(self, timeout_s: float) -> None:
        assert CHROMIUM is not None
        self._timeout_s, self._number, self._rest = timeout_s, 0, b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        pipes = (*os.pipe(), *os.pipe())
        their_in, self._out, self._in, their_out = pipes
        theirs = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (their_in, their_out)]
        words = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--window-size=1200,900", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, *map(str, theirs), *words], pass_fds=theirs, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for number in (their_in, their_out, *theirs):
            os.close(number)

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._session = None
                self.call("Browser.close")
                self._process.wait(self._timeout_s)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, 9)
                self._process.wait()
            os.close(self._in)
            os.close(self._out)
            self._profile.cleanup()

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method and return its result; what happens meanwhile goes to `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._out, rest) :]
        end_s = time.monotonic() + self._timeout_s
        while True:
            answer = self._next(end_s)
            if answer.get("id") != self._number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def evaluate(self, source: str) -> Any:
        """Return what JavaScript gives, also what it promises."""
        found = self.call("Runtime.evaluate", expression=source, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def open(self, address: str) -> None:
        """Open a page and wait until it is loaded and painted."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        end_s = time.monotonic() + self._timeout_s
        while not self.evaluate("document.readyState === 'complete' && performance.getEntriesByType('paint').length"):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{address} is not painted")
            time.sleep(0.02)

    def first_paint_s(self) -> float:
        """Return after how many seconds the page had its first contents."""
        return (
            float(self.evaluate("Math.max(...performance.getEntriesByType('paint').map(one => one.startTime))")) / 1e3
        )

    def screen(self, scheme: str, width: int) -> None:
        """Have pages be shown as on a "light" or a "dark" screen of so many pixels."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        """Return what is seen of the page as PNG, of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def problems(self, axe: str) -> list[str]:
        """Return what axe-core, given as its source, finds that is serious or critical."""
        self.evaluate(f"{axe}; 0")
        found = self.evaluate("axe.run().then(found => found.violations)")
        return [
            f"{one['impact']}: {one['id']}: {one['help']}: {node['html'][:200]}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, and what was asked of the network, since the page was opened."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Network.requestWillBeSent":
                address = params["request"]["url"]
                if not address.startswith(("file:", "data:", "about:")):
                    found.append(f"fetched {address}")
        return found

    def _next(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._in], [], [], left_s)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))
