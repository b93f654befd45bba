"""Loading an app anew while it serves: `fastserve run app.py --reload`.

    a file has changed -> the script is run in a process of its own -> its models are written into the
    repository with another stamp -> the server loads them beside the old ones, which answer until then

So ports and connections stay, and no request is lost. A script that cannot be run changes nothing: it has
said why on standard error, and the next change is waited for. Watched are the script and the modules of its
folder that it imports, at whatever place in its text, and files that such an import would find.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastserve.app.describe import Description
from fastserve.app.models_folder import list_paths, write_models
from fastserve.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 0.2
MOST_FILES = 5_000
Configs = dict[str, dict[str, Any]]


def imported_files(script: Path) -> list[Path]:
    """Return the script and the files of its folder that it imports, themselves and through others. A module
    that the folder has not is the file that would be it."""
    folder = script.parent
    found: dict[Path, None] = {}
    left = [script]
    while left and len(found) < MOST_FILES:
        file = left.pop()
        if file in found:
            continue
        found[file] = None
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            for name, parent in _imports(ast.parse(file.read_bytes()), file, folder):
                left += _files_of(name, parent)
    return list(found)


def _imports(tree: ast.AST, file: Path, folder: Path) -> Iterator[tuple[list[str], Path]]:
    """Yield the parts of each name that is imported, with the folder where it begins."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield one.name.split("."), folder
        elif isinstance(node, ast.ImportFrom):
            parent = file.parents[node.level - 1] if node.level else folder
            parts = node.module.split(".") if node.module else []
            for one in node.names:
                yield [*parts, one.name], parent


def _files_of(parts: list[str], folder: Path) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it; the rest of a name is no module."""
    for part in parts:
        package = folder / part
        if (package / "__init__.py").is_file():
            yield package / "__init__.py"
        elif package.is_dir():
            pass  # a package without a file
        else:
            yield folder / f"{part}.py"
            return
        folder = package


class Watch:
    """The files of a script, and whether they have changed. `stamp` is another for other contents."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self.stamp = ""
        self._looked: dict[Path, tuple[int, ...]] = {}

    def changed(self) -> bool:
        """Return whether the contents differ from those of the last call; True for the first."""
        if self._looked and self._looked == {file: _stat(file) for file in self._looked}:
            return False
        files = imported_files(self._script)
        self._looked = {file: _stat(file) for file in files}
        digest = hashlib.sha256()
        for file in files:
            with contextlib.suppress(OSError):
                content = file.read_bytes()
                digest.update(f"{file}\0{len(content)}\0".encode() + content)
        before, self.stamp = self.stamp, digest.hexdigest()[:16]
        return self.stamp != before


def _stat(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


class Reloader:
    """Follows a script: `first` waits until it can be run, `following` writes its later models."""

    def __init__(self, script: Path) -> None:
        self._script, self._watch = script, Watch(script)
        self._running: Description | None = None
        self._ended = threading.Event()

    def first(self, say: Callable[[str], None]) -> Configs:
        """Wait for a script that can be run, and return its models."""
        while True:
            try:
                found = self._look()
                if found is not None:
                    list_paths(found)
                    return found
            except ConfigError as fault:
                say(self._refusal(fault))
            self._ended.wait(LOOK_S / 4)

    @contextlib.contextmanager
    def following(self, root: Path) -> Iterator[None]:
        """Write the models into the repository `root` whenever the script changes."""
        thread = threading.Thread(target=self._follow, args=(root,), name="reload", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _follow(self, root: Path) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                found = self._look()
                if found is not None:
                    list_paths(found)
                    write_models(found, root)
                    log.info("%s has changed: %s are loaded anew", self._script.name, ", ".join(found))
            except ConfigError as fault:
                log.error("%s", self._refusal(fault))
            except OSError as fault:
                log.error("%s: its models cannot be written: %s", self._script.name, fault.strerror)
        if self._running is not None:
            self._running.close()

    def _look(self) -> Configs | None:
        """Return the models of a changed script once it has been run. Raises ConfigError."""
        if self._watch.changed():
            if self._running is not None:
                self._running.close()
            self._running = Description(self._script)
        if self._running is None or not self._running.done:
            return None
        ended, self._running = self._running, None
        with contextlib.closing(ended):
            return stamped(ended.read(), self._watch.stamp)

    def _refusal(self, fault: ConfigError) -> str:
        return f"{fault}; the next change of {self._script.name} or its modules is waited for"


def stamped(configs: Mapping[str, Mapping[str, Any]], stamp: str) -> Configs:
    """Return configurations of models that are loaded anew when the stamp is another."""
    found = {}
    for name, config in configs.items():
        parameters = config["parameters"]
        script = {**parameters["script"], "stamp": stamp}
        found[name] = {**config, "parameters": {**parameters, "script": script}}
    return found


def say_on_terminal(text: str) -> None:
    """Write a line on standard error: no log is set up before the server starts."""
    print(f"fastserve: {text}", file=sys.stderr)
