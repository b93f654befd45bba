"""A headless Chromium, driven over a pipe by its DevTools protocol: pages are opened, read and clicked.

async with Chromium(profile) as browser:
    await browser.open("http://127.0.0.1:8000/console")
    await browser.until("document.title === 'ready'")
    assert browser.said == []           # errors of scripts, breaches of a policy, messages of the console
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

FOUND = shutil.which("chromium")
LIMIT_S = 30.0
LONGEST = 64 << 20
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--ignore-certificate-errors", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip


class Chromium:
    """One browser with one page. Raises TimeoutError where something does not come about in LIMIT_S."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        self.said: list[str] = []
        self.requests: list[str] = []
        self._profile, self._size = profile, (width, height)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self._session = ""
        self._number = 0

    async def __aenter__(self) -> Chromium:
        loop = asyncio.get_running_loop()
        commands, self._commands = os.pipe()
        answers, replies = os.pipe()
        self._process = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", f'exec chromium "$@" 3<&{commands} 4>&{replies}', "chromium",
            *FLAGS, f"--user-data-dir={self._profile}", "about:blank",
            pass_fds=(commands, replies), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(commands)
        os.close(replies)
        self._reader = asyncio.StreamReader(LONGEST)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        self._pipe, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(answers, "rb", 0))
        self._hearing = asyncio.ensure_future(self._hear())
        pages = (await self.do("Target.getTargets"))["targetInfos"]
        page = next(one for one in pages if one["type"] == "page")
        attached = await self.do("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.do(f"{domain}.enable")
        await self.resize(*self._size)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        await self.do("Browser.close")
        await asyncio.wait_for(self._process.wait(), LIMIT_S)
        await self._hearing
        self._pipe.close()
        os.close(self._commands)

    async def do(self, method: str, **parameters: Any) -> Any:
        """Return the result of one command. Raises RuntimeError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        told = await asyncio.wait_for(answer, LIMIT_S)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        return told["result"]

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.do("Emulation.setDeviceMetricsOverride", **size)

    async def dark(self, on: bool) -> None:
        """Set what the system prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[feature])

    async def open(self, address: str) -> None:
        """Open a page, and return when it has loaded."""
        self._loaded.clear()
        await self.do("Page.navigate", url=address)
        await asyncio.wait_for(self._loaded.wait(), LIMIT_S)

    async def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives, as JSON has it. Raises RuntimeError."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = await self.do("Runtime.evaluate", **asked)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Return what the expression gives as soon as that is true."""
        wait = f"new Promise((done) => {{ const look = () => {{ const found = ({expression});"
        wait += " if (found) done(found); else setTimeout(look, 10); }; look(); })"
        return await self.value(wait)

    async def press(self, key: str) -> None:
        """Press a key: a character, or the name of one."""
        known = {"Enter": ("\r", 13), "Escape": ("", 27)}
        text, code = known.get(key, (key, 0))
        more: dict[str, Any] = {"windowsVirtualKeyCode": code} | ({"text": text} if text else {})
        await self.do("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        await self.do("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def picture(self, file: Path, whole: bool = False) -> None:
        """Write what is to be seen as a PNG; `whole` the page beyond the window too."""
        shot = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    async def _hear(self) -> None:
        while True:
            try:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            if "id" in message:
                answer = self._waiting.pop(message["id"])
                if not answer.done():
                    answer.set_result(message)
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(one.get("value", "")) for one in told["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and "favicon.ico" not in told["entry"].get("url", ""):
            self.said.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
