"""A recipe of docs/recipes, done as it is written: its files, its commands, and the answers shown below them.

| block | content |
|---|---|
| `python title="app.py"` | a file of the reader's folder |
| `sh` | commands; a server runs until the page ends, `pip install` and `hf download` are left out |
| `json`, `text` | the output of the commands above it; `...` stands for any text, last digits may differ |
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests import warm
from tests.running import CLI, Running

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
ADDRESS, GRPC_ADDRESS = "127.0.0.1:8000", "127.0.0.1:8001"
LEFT_OUT = ["pip", "install"], ["hf", "download"]
COMMAND_S = 240
RELATIVE, ABSOLUTE = 2e-3, 2e-4


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Recipe:
    """One page."""

    name: str
    blocks: tuple[Block, ...]


def read_recipe(path: Path) -> Recipe:
    return Recipe(path.stem, tuple(Block(*found) for found in BLOCK.findall(path.read_text())))


class RecipeServer(Running):
    """`fastserve run FILE` or `fastserve serve FOLDER` of a page, on ports of its own."""

    def __init__(self, words: list[str], folder: Path, log: Path, torch: bool) -> None:
        super().__init__(folder, log, torch=torch)
        command, target, *options = words
        if (folder / target).exists():
            target = str(folder / target)
        self._command = [sys.executable, "-m", CLI, command, target, "--drain-delay-s", "0", *options]


class Kitchen:
    """A folder in which recipes are done. `torch`: servers start from a process that has imported it."""

    def __init__(self, folder: Path, *, torch: bool = False) -> None:
        self.folder = folder
        self.done = 0  # outputs compared
        self._torch = torch
        self._stack = ExitStack()
        self._server: RecipeServer | None = None

    def __enter__(self) -> Kitchen:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    def do(self, recipe: Recipe) -> None:
        """Write, run and compare each block. Raises AssertionError where an output differs."""
        output = ""
        for block in recipe.blocks:
            text = block.text
            if block.title:
                path = self.folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._at_home(text))
            elif block.language == "sh":
                output = "".join(self._run(command) for command in split_commands(text))
            elif block.language in ("json", "text"):
                compare(output, text)
                self.done += 1

    def _at_home(self, text: str) -> str:
        """Put the server's addresses in place of those that a page shows."""
        if self._server is None:
            return text
        return text.replace(ADDRESS, self._server.http).replace(GRPC_ADDRESS, self._server.grpc)

    def _run(self, command: str) -> str:
        """Return what a command prints; a server is started, and answers from here on."""
        words = shlex.split(command, comments=True)
        if not words or words[:2] in LEFT_OUT:
            return ""
        if words[0] == "fastserve" and words[1] in ("run", "serve"):
            server = RecipeServer(words[1:], self.folder, self.folder / "server.log", self._torch)
            self._server = self._stack.enter_context(server)
            for path in self.folder.rglob("*.py"):  # clients are written before the server has its port
                path.write_text(self._at_home(path.read_text()))
            return ""
        if words[0] == "curl":
            command = command.replace("curl ", "curl -sS --max-time 60 ", 1)
        if words[0] == "python" and self._torch:
            return self._run_script(*words[1:])
        # `python` and `fastserve` are those of this environment.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", self._at_home(command)],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout if done.stdout.endswith("\n") or not done.stdout else done.stdout + "\n"

    def _run_script(self, name: str, *arguments: str) -> str:
        """`python NAME ARGUMENTS`, in a process that has imported torch already."""
        zygote = warm.ZYGOTES.find(os.environ, torch=True)
        assert zygote is not None
        done = warm.run_to_end(zygote, name, arguments, COMMAND_S, folder=self.folder)
        assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def split_commands(text: str) -> list[str]:
    """Return the commands of a block; a quotation or a backslash makes one go on in the next line."""
    commands, begun = [], ""
    for line in text.splitlines(keepends=True):
        begun += line
        try:
            shlex.split(begun, comments=True)
        except ValueError:  # a quotation is open
            continue
        if not begun.endswith("\\\n"):
            commands.append(begun)
            begun = ""
    assert not begun, begun
    return commands


def compare(got: str, shown: str) -> None:
    """Compare an output with the one a page shows: texts alike but for spaces, numbers nearly so."""
    printed, wanted = ("".join(text.split()) for text in (got, shown))  # pages wrap long lines
    pattern = re.escape(NUMBER.sub("\0", wanted))
    pattern = pattern.replace(re.escape("..."), ".*?").replace(re.escape("\0"), f"({NUMBER.pattern})")
    found = re.fullmatch(pattern, printed)
    assert found is not None, f"printed:\n{got}\nshown:\n{shown}"
    for number, expected in zip(found.groups(), NUMBER.findall(wanted), strict=True):
        near = abs(float(number) - float(expected)) <= ABSOLUTE + RELATIVE * abs(float(expected))
        assert near, f"printed {number}, shown {expected}"
