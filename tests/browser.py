"""A headless Chromium for tests, driven over its DevTools pipe: a real one is clicked, nothing else is installed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

SECONDS = 90
"""How long an answer or a page may take, on a loaded machine."""


def find_chromium() -> str | None:
    """Its path: the variable CHROMIUM, or what is installed; None: there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page of a headless Chromium.

    ``errors``: what its console and its security policy complained of, and dialogs that opened; ``requests``: the
    addresses that were asked for.
    """

    def __init__(self, chromium: str, profile: Path) -> None:
        to_us, from_us = os.pipe(), os.pipe()
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank",
        ]  # fmt: skip
        # Chromium reads from descriptor 3 and writes to 4.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (from_us[0], to_us[1])]
        script = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, chromium, *arguments],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (from_us[0], to_us[1], *theirs):
            os.close(end)
        self._out, self._in = from_us[1], to_us[0]
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._heard(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {SECONDS} s")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise RuntimeError(f"Chromium ended with exit code {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _heard(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        params = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.errors.append(f"console.{params['type']}: {params['args']}")
            case "Page.javascriptDialogOpening":
                self.errors.append(f"dialog: {params['message']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def go(self, url: str) -> None:
        self._events.clear()
        if "loaderId" in self.call("Page.navigate", url=url):  # else it is another place of the same page
            self._loaded()

    def click(self, selector: str) -> None:
        """Click the middle of the first element that ``selector`` matches, as a mouse does; await where it leads."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getClientRects()[0];"
            "const x = r.x + r.width / 2, y = r.y + r.height / 2;"
            "return [x, y, e.contains(document.elementFromPoint(x, y))]; })()"
        )
        assert found, f"nothing matches {selector} on {self.run('location.href')}"
        x, y, hit = found
        assert hit, f"{selector} is covered by something else"
        self._events.clear()
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self._loaded("Page.loadEventFired", "Page.navigatedWithinDocument")

    def write(self, selector: str, text: str) -> None:
        """Type ``text`` into a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def _loaded(self, *signs: str) -> None:
        until = time.monotonic() + SECONDS
        while not any(event.get("method") in (signs or ("Page.loadEventFired",)) for event in self._events):
            self._heard(self._next(until))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def size(self, width: int, height: int = 900, *, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def media(self, kind: str = "", *, dark: bool = False) -> None:
        """Show the page as on paper (``kind`` "print"), or in dark or light colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    @property
    def overflow(self) -> list[str]:
        """The elements that reach beyond the right edge of the window, outside of what scrolls by itself."""
        return list(
            self.run(
                "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll *, svg *, .skip') &&"
                "e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)"
                ".map(e => e.outerHTML.slice(0, 120)).concat(document.documentElement.scrollWidth >"
                "document.documentElement.clientWidth ? ['the page'] : [])"
            )
        )

    def picture(self, file: Path, *, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def paper(self, file: Path) -> None:
        """The page as a PDF of A4."""
        data = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)["data"]
        file.write_bytes(base64.b64decode(data))
