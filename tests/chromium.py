"""Drive a headless Chromium by its DevTools protocol: open pages, evaluate JavaScript, type, take screenshots.

Chromium reads commands from file descriptor 3 and writes replies to 4, as JSON texts that end with a zero byte
(``--remote-debugging-pipe``): no port and no library is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from limits import scaled

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOAD_TIMEOUT = 60.0
"""Seconds for one command or one page, before scaling."""


def find() -> str | None:
    """Return the path of a Chromium, or None if this machine has none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class ChromiumError(RuntimeError):
    """Chromium has ended, refused a command or thrown an exception."""


class Page:
    """One tab, whose errors and requests are recorded."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._received = b""
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """What pages have written to the console as errors, exceptions, and failed requests, since the start."""
        self.requests: list[str] = []
        """The URLs that pages have asked for."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)  # a clipboard is for the page with the focus

    # -- the protocol ------------------------------------------------------------------------------------------

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result.

        Raises:
            ChromiumError: Chromium refuses it, or has ended.
            TimeoutError: it doesn't reply.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + scaled(LOAD_TIMEOUT)
        while (reply := self._next(deadline)).get("id") != self._number:
            self._events.append(reply)
        if "error" in reply:
            raise ChromiumError(f"{method}: {reply['error']['message']}")
        return dict(reply["result"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select.select([self._from_browser], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not reply")
            if not (part := os.read(self._from_browser, 1 << 20)):
                raise ChromiumError("Chromium has ended")
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._record(message.get("method", ""), message.get("params", {}))
        return message

    def _record(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    # -- what a person does ------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page, with its scripts and pictures."""
        self._events.clear()
        self.send("Page.navigate", url=url)
        deadline = time.monotonic() + scaled(LOAD_TIMEOUT)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next(deadline))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; that of a promise once it is fulfilled.

        Raises:
            ChromiumError: it throws.
        """
        done = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise ChromiumError(details.get("exception", {}).get("description", details["text"]))
        return done["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Evaluate an expression until its value is true, and return that; an element that is found is true.

        Raises:
            TimeoutError: it isn't in time.
        """
        deadline = time.monotonic() + scaled(LOAD_TIMEOUT)
        value_of = f"(async () => {{const value = await ({expression}); return value instanceof Node || value}})()"
        while not (value := self.evaluate(value_of)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """Click on the middle of the first element that a CSS selector finds."""
        x, y = self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "center", behavior: "instant"}});
              const box = element.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a point of the page, in CSS pixels."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="none")

    def type(self, text: str) -> None:
        """Type a text, letter by letter, into the element that has the focus."""
        for letter in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def resize(self, width: int, height: int) -> None:
        """Give the page a size in CSS pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        """Write what is seen of the page to a PNG file."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def page(width: int = 1280, height: int = 900) -> Iterator[Page]:
    """Start Chromium, yield a tab of it, and end it with all its processes.

    Raises:
        ChromiumError: it does not start.
    """
    executable = find()
    assert executable is not None, "ask find() first"
    with tempfile.TemporaryDirectory(prefix="torchhal-chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            executable, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        commands, replies = os.pipe(), os.pipe()
        # Above 4, so that neither is overwritten before it is duplicated.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (commands[0], replies[1])]
        log = os.open(f"{profile}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs[0], 3), (os.POSIX_SPAWN_DUP2, theirs[1], 4), (os.POSIX_SPAWN_DUP2, log, 2),
        ]  # fmt: skip
        pid = os.posix_spawn(executable, command, os.environ, file_actions=actions, setpgroup=0)
        for fd in (*theirs, commands[0], replies[1], log):
            os.close(fd)
        try:
            tab = Page(commands[1], replies[0])
            tab.resize(width, height)
            yield tab
        except (ChromiumError, BrokenPipeError) as error:
            raise ChromiumError(f"{error}\n{Path(f'{profile}.log').read_text(errors='replace')[-2000:]}") from error
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(commands[1])
            os.close(replies[0])
            Path(f"{profile}.log").unlink()
