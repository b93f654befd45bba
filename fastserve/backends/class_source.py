"""The source of a class that no file holds: typed into a notebook, a prompt, or `python -c`.

`collect_source` writes one text that defines the class and every global name that it uses, each by what a
fresh process can make again: an import, the source of another typed class or function, a plain value.
`run_source` makes a module of that text, in a worker. What has no source (a prompt of Python 3.12 and
older keeps none) is a TypeError that says to put the class in a file.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fastserve.codec.safe_msgpack import SCRIPT

FILENAME = "<class of a prompt>"
MAX_BYTES = 32 << 10  # of the text; it travels in one message of at most 64 KiB
ADVICE = "put the class in a file and import it from there"
_PROMPTS = ("<stdin", "<python-input", "<ipython")
_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def codes_of(owner: Any) -> list[CodeType]:
    """Return the code of a function, or of every function that a class itself defines (also decorated
    ones)."""
    if isinstance(owner, FunctionType):
        return [owner.__code__]
    found = []
    for member in vars(owner).values():
        inner = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
        function = inspect.unwrap(inner) if callable(inner) else inner
        if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{owner.__qualname__}."):
            found.append(function.__code__)
    return found


def typed_at_prompt(kind: type) -> bool:
    """Return whether the class was defined at a prompt, not in a file."""
    return any(code.co_filename.startswith(_PROMPTS) for code in codes_of(kind))


def collect_source(kind: type) -> str:
    """Return a text that defines the class, and before it whatever it uses of its module.

    Raises TypeError, naming the class or the global name that cannot travel.
    """
    collector = _Collector(sys.modules[kind.__module__])
    collector.define(kind.__qualname__.partition(".")[0], kind)
    text = "".join(f"{part}\n" for part in collector.parts)
    if len(text.encode()) > MAX_BYTES:
        raise TypeError(
            f"the source of {kind.__qualname__} and what it uses is {len(text.encode())} bytes, and at most "
            f"{MAX_BYTES} travel to a worker; {ADVICE}"
        )
    return f"from __future__ import annotations\n{text}" if collector.late_annotations else text


def run_source(text: str) -> ModuleType:
    """Execute the text as a new module and return that. Tracebacks show its lines."""
    module = ModuleType(SCRIPT)
    sys.modules[SCRIPT] = module
    linecache.cache[FILENAME] = (len(text), None, text.splitlines(keepends=True), FILENAME)
    exec(compile(text, FILENAME, "exec", dont_inherit=True), module.__dict__)
    return module


class _Collector:
    """Gathers definitions in the order of their dependencies."""

    def __init__(self, module: ModuleType) -> None:
        self.parts: list[str] = []
        self.late_annotations = False
        self._globals = vars(module)
        self._module = module.__name__
        self._seen: set[str] = set()

    def define(self, name: str, owner: Any) -> None:
        """Add the source of a class or function of the module, under its own name, and what it uses."""
        self._seen.add(name)
        codes = codes_of(owner)
        source = next(filter(None, (_definition(code, name) for code in codes)), None) or _latest(name)
        if source is None:
            raise TypeError(
                f"{getattr(owner, '__qualname__', name)} was typed into a prompt that keeps no source, "
                f"so that no worker can get it; {ADVICE}"
            )
        late = any(code.co_flags & annotations.compiler_flag for code in codes)
        self.late_annotations = self.late_annotations or late
        for used in sorted(set(_globals_of(compile(source, FILENAME, "exec", dont_inherit=True)))):
            self._need(used, name)
        self.parts.append(source)

    def _need(self, name: str, user: str) -> None:
        """Make a global name mean in the worker what it means here."""
        if name in self._seen or name not in self._globals:
            return  # a builtin, the definition itself, or what is not there here either
        self._seen.add(name)
        value = self._globals[name]
        whole = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, ModuleType):
            self.parts.append(f"import {value.__name__}" + f" as {name}" * (value.__name__ != name))
        elif getattr(whole, "__module__", None) == self._module and isinstance(whole, (type, FunctionType)):
            self.define(whole.__qualname__.partition(".")[0], whole)
            if whole.__qualname__ != name:
                self.parts.append(f"{name} = {whole.__qualname__}")
        elif _importable(value):
            home, attribute = value.__module__, value.__qualname__
            self.parts.append(f"from {home} import {attribute}" + f" as {name}" * (attribute != name))
        elif _plain(value):
            self.parts.append(f"{name} = {value!r}")
        else:
            raise TypeError(
                f"{user} uses {name}, a {type(value).__qualname__} that a worker cannot get; pass it in "
                f"worker_init_kwargs or make it in __init__, or {ADVICE}"
            )


def _definition(code: CodeType, name: str) -> str | None:
    """Return the text of the outermost definition called `name` around this code; None where no text is
    kept."""
    lines = linecache.getlines(code.co_filename) or _command_lines(code.co_filename)
    for first, last in _places(lines, name):
        if first <= code.co_firstlineno <= last:
            return _cut(lines, first, last)
    return None


def _latest(name: str) -> str | None:
    """Return the text of the latest definition called `name`. A class without functions of its own does not
    say where it comes from."""
    typed = [filename for filename in linecache.cache if not os.path.exists(filename)]
    for filename in ["<string>", *reversed(typed)]:
        lines = _command_lines(filename) or linecache.getlines(filename)
        for first, last in reversed(_places(lines, name)):
            return _cut(lines, first, last)
    return None


def _places(lines: Sequence[str], name: str) -> list[tuple[int, int]]:
    """Yield the first and last line of every definition of a name, outermost first, decorators included."""
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return []  # a cell with magic commands
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _Definition) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found.append((first, node.end_lineno or first))
    return found


def _cut(lines: Sequence[str], first: int, last: int) -> str:
    """Return the lines, dedented as their first is."""
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    return "".join(line[indent:] if line[:indent].isspace() else line for line in lines[first - 1 : last])


def _command_lines(filename: str) -> list[str]:
    """Return the lines of `python -c`."""
    words = sys.orig_argv
    if filename != "<string>" or "-c" not in words[:-1]:
        return []
    return words[words.index("-c") + 1].splitlines(keepends=True)


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield every name that this code, or code inside it, may read from its module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_LOADS:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _importable(value: Any) -> bool:
    """Return whether a fresh import of its module has this very object under its name."""
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(home, str) or not isinstance(name, str):
        return False
    return getattr(sys.modules.get(home), name, None) is value


def _plain(value: Any) -> bool:
    """Return whether its `repr` is a literal of the same value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
