"""A headless Chromium that tests drive by the DevTools protocol, over two pipes.

It needs the program `chromium` or Google Chrome.
"""

import base64
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from tests.support.processes import HANGING_SECONDS

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--no-default-browser-check", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
# name -> (code, number) of keys without text
_KEYS = {"Tab": ("Tab", 9), "Escape": ("Escape", 27), "ArrowRight": ("ArrowRight", 39), "ArrowLeft": ("ArrowLeft", 37)}
# name -> (code, number, text)
_TYPING_KEYS = {"Enter": ("Enter", 13, "\r"), " ": ("Space", 32, " ")}
_SHIFT = 8


def browser_program() -> str | None:
    """Return the path of the browser, or None if this machine has none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """A running browser."""

    def __init__(self, process: "subprocess.Popen[bytes]", reading: int, writing: int) -> None:
        self._process = process
        self._reading, self._writing = reading, writing
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._count = 0
        threading.Thread(target=self._read, name="browser", daemon=True).start()

    def _read(self) -> None:
        """Pass answers to their callers, and events to their pages, until the browser ends."""
        rest = b""
        with suppress(OSError):
            while piece := os.read(self._reading, 1 << 20):
                *messages, rest = (rest + piece).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.pop(message["id"]).put(message)
                    elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                        page.note(message["method"], message["params"])

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._count += 1
        number, answer = self._count, Queue[dict[str, Any]]()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        found = answer.get(timeout=HANGING_SECONDS)
        assert "error" not in found, found["error"]
        result: dict[str, Any] = found["result"]
        return result

    @contextmanager
    def page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Iterator[Page]":
        """Open an empty page in a new profile."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        try:
            yield page
        finally:
            del self._pages[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        with suppress(OSError, AssertionError):
            self.call("Browser.close")
        self._process.wait(HANGING_SECONDS)


@dataclass
class Page:
    """One page. `errors` has its uncaught exceptions, console errors, violated policies, and failed requests."""

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    loaded: threading.Event = field(default_factory=threading.Event)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def note(self, method: str, parameters: Mapping[str, Any]) -> None:
        """Record an event of the page. Runs on the thread that reads the pipe."""
        match method:
            case "Page.loadEventFired":
                self.loaded.set()
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(str([argument.get("value") for argument in parameters["args"]]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.loaded.clear()
        self.call("Page.navigate", url=url)
        assert self.loaded.wait(HANGING_SECONDS)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, script: str) -> Any:
        """Return the value of an expression, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, f"{condition}: {self.text()}"
            time.sleep(0.02)
        return value

    def text(self) -> str:
        text: str = self.run("document.body.innerText")
        return text

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{find} !== null && !{find}.disabled")
        x, y = self.run(
            f"(() => {{ const found = {find}; found.scrollIntoView({{block: 'center'}});"
            " const box = found.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Insert a text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        known = _TYPING_KEYS.get(key) or _KEYS[key]
        code, number, *text = known
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": _SHIFT if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common, text="".join(text))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page, of its `whole` height or of the window."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Start the browser with an empty profile folder, and end it after the body."""
    program = browser_program()
    assert program is not None, "this machine has no Chromium"
    (to_read, their_writing), (their_reading, to_write) = os.pipe(), os.pipe()
    # the browser reads from descriptor 3 and writes to 4
    start = f'exec "$@" 3<&{their_reading} 4>&{their_writing}'
    process = subprocess.Popen(
        ["bash", "-c", start, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(their_reading, their_writing),
        env={**os.environ, "HOME": str(profile)},
    )  # fmt: skip
    os.close(their_reading)
    os.close(their_writing)
    browser = Browser(process, to_read, to_write)
    try:
        yield browser
    finally:
        browser.close()
        os.close(to_read)
        os.close(to_write)
