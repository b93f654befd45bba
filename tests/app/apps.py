"""Servers of scripts, as their users run them: `fastserve run FILE`, or the script itself."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.running import CLI, Running


class RunningApp(Running):
    """`fastserve run FILE`."""

    def __init__(self, file: Path, log: Path, *options: str, **more: Any) -> None:
        super().__init__(file, log, *options, **more)
        self._command = [sys.executable, "-m", CLI, "run", str(file), "--drain-delay-s", "0", *options]

    def post(
        self, path: str, body: Any = None, *, raw: bytes = b"", accept: str = "*/*"
    ) -> tuple[int, str, bytes]:
        """Return status, media type and body of an answer."""
        data = raw or (b"" if body is None else json.dumps(body).encode())
        asked = urllib.request.Request(f"http://{self.http}{path}", data, {"Accept": accept})
        try:
            with urllib.request.urlopen(asked, timeout=60) as reply:
                return reply.status, reply.headers["Content-Type"], reply.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.headers["Content-Type"], refused.read()

    def ask(self, path: str, body: Any) -> Any:
        """Return the answer as JSON; anything but 200 fails."""
        status, _, said = self.post(path, body)
        assert status == 200, said
        return json.loads(said)

    def refusal(self, path: str, body: Any = None, *, raw: bytes = b"") -> tuple[int, str]:
        """Return status and text of an error."""
        status, _, said = self.post(path, body, raw=raw)
        return status, json.loads(said)["error"]


class ColdApp(RunningApp):
    """`fastserve run FILE`, started by exec: a warm server cannot import numpy, which its own models need."""

    def _start(self, command: list[str], stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)


def write_app(folder: Path, text: str, name: str = "app.py") -> Path:
    """Write a script, which imports fastserve first."""
    file = folder / name
    file.write_text("import fastserve\n" + textwrap.dedent(text))
    return file
