"""A headless Chromium that a test drives: opens pages, runs JavaScript in them, takes pictures.

It speaks the Chrome DevTools Protocol over a pair of pipes: JSON messages, each ended by a zero
byte. Every request that a page makes, and everything it complains of, is noted, so that a test can
say that there was nothing of the kind.
"""

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
COMMAND_DEADLINE_S = 30.0
START_DEADLINE_S = 45.0
POLL_S = 0.05

# The browser reads its commands from descriptor 3 and answers on 4; only a process of its own can
# put them there without disturbing those of the tests. Copies far above keep both apart meanwhile.
_LAUNCHER = """
import fcntl, os, sys
copies = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
for number, copy in zip((3, 4), copies):
    os.dup2(copy, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(Exception):
    """The browser refused a command, or the page's script failed."""


@dataclass
class Page:
    """One tab."""

    browser: "Browser"
    session: str
    complaints: list[str] = field(default_factory=list)
    """Uncaught exceptions, errors on the console, refused resources."""
    urls: list[str] = field(default_factory=list)
    """What was asked of the network."""

    def open(self, url: str) -> None:
        """Go to a page and wait until its scripts have been loaded."""
        self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:  # noqa: ANN401
        """Value of an expression in the page, as JSON has it; promises are awaited."""
        answer = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def wait_for(self, script: str, *, deadline_s: float = 20.0) -> None:
        """Wait until an expression is true; shows what the page says if it does not become so."""
        due_s = time.monotonic() + deadline_s
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < due_s, f"{script} did not become true:\n{self.text()}"
            time.sleep(POLL_S)

    def text(self, selector: str = "body") -> str:
        """What a reader sees of an element."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def fill(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.command("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Press a button."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def size(self, width: int, height: int) -> None:
        """Give the window's size in pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        # Otherwise a picture is narrower than the page by the width of a scroll bar.
        self.command("Emulation.setScrollbarsHidden", hidden=True)

    def prefer(self, scheme: str) -> None:
        """Set what the reader's system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """Put a picture of the whole page into a PNG file."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401
        """Send a command of the protocol to this tab."""
        return self.browser.command(method, self.session, **parameters)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """Take an event of this tab in."""
        if method == "Network.requestWillBeSent":
            self.urls.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(parameters["args"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.complaints.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")


class Browser:
    """A running Chromium. Made by `start_browser`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._received = bytearray()
        self._number = 0
        self._pages: dict[str, Page] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(answers, selectors.EVENT_READ)

    @contextmanager
    def page(self) -> Iterator[Page]:
        """Give a tab with a memory of its own, closed at the end."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.command(f"{domain}.enable")
        try:
            yield page
        finally:
            del self._pages[page.session]
            self.command("Target.disposeBrowserContext", browserContextId=context)

    def command(
        self,
        method: str,
        session: str | None = None,
        *,
        deadline_s: float = COMMAND_DEADLINE_S,
        **parameters: Any,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come before it are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        due_s = time.monotonic() + deadline_s
        while True:
            answer = self._receive(due_s)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def close(self) -> None:
        """Give the pipes back; the browser ends when its commands do."""
        self._selector.close()
        os.close(self._commands)
        os.close(self._answers)

    def _receive(self, due_s: float) -> dict[str, Any]:
        """Give the next message, after noting it where it is an event of a tab."""
        while (end := self._received.find(b"\0")) < 0:
            assert self._selector.select(max(0.0, due_s - time.monotonic())), "no answer in time"
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has ended"
            self._received += data
        message: dict[str, Any] = json.loads(self._received[:end])
        del self._received[: end + 1]
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.note(message["method"], message["params"])
        return message


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Give a browser whose files lie in `profile`; it is ended at the end."""
    assert CHROMIUM is not None
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    words = [
        *(sys.executable, "-c", _LAUNCHER, str(read_commands), str(write_answers), CHROMIUM),
        *("--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
        # Tests run as root in containers, where Chromium's own sandbox cannot.
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-sync", "--disable-extensions"),
        *("--disable-component-update", "--no-default-browser-check", "--mute-audio"),
    ]
    with open(profile / "chromium.log", "wb") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[read_commands, write_answers],
            start_new_session=True,
        )
    os.close(read_commands)
    os.close(write_answers)
    browser = Browser(commands, answers)
    try:
        browser.command("Browser.getVersion", deadline_s=START_DEADLINE_S)
        yield browser
    finally:
        browser.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)
