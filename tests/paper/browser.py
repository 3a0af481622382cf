"""A real browser without a screen, driven through its debugging pipe: nothing but Chromium itself is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE = 120
"""Seconds after which an answer will not come any more; a busy machine needs some."""


# Chromium reads its orders from 3 and answers on 4. They may be taken here, so they are set in the new process.
LAUNCH = """
import fcntl, os, sys
orders, answers = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 20) for each in sys.argv[1:3])
os.dup2(orders, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One window. Use it as a context."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="sgdol-browser-", ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.answers, to_write = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", LAUNCH, str(to_read), str(to_write),
                CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
                f"--user-data-dir={self.profile.name}", "about:blank",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.number, self.session = b"", 0, None
        self.problems: list[str] = []
        self.loads = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.answers)
        self.profile.cleanup()

    def call(self, method, **parameters):
        """One order and its answer."""
        self.number += 1
        order = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            order["sessionId"] = self.session
        os.write(self.to, json.dumps(order).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self.answers, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("the browser does not answer")
            self.buffer += piece
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(raw)
        self._note(message)
        return message

    def _note(self, message):
        """What the page complains of, and what it asks the network for."""
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.problems.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith(("data:", "file:", "blob:", "about:")):
                    self.problems.append(f"asked for {url}")
            case "Page.loadEventFired":
                self.loads += 1

    def open(self, path, *, width=1400, height=900, dark=False, media=""):
        """Show a file and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.problems.clear()
        before = self.loads
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while self.loads == before:
            self._next()

    def run(self, script):
        """The value of a script, which may wait for something."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def picture(self, path, *, whole=True):
        """A PNG of the page, the whole of it or what the window shows."""
        content = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        Path(path).write_bytes(base64.b64decode(content))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}}

    def pdf(self):
        """The page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])
