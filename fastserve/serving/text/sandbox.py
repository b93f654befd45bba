"""The Jinja environment of chat templates: transformers' sandbox, with bounds on a template's work.

A template reaches plain data only, as in transformers. It is stopped

- after MOST_TURNS turns of its loops and calls of its macros, or MOST_S seconds, checked in each of them;
- when a text or list it makes with an operator, a filter or a call grows beyond MOST_SIZE;
- when it multiplies, pads or formats by a number beyond MOST_SIZE, before that is done.

A single call that grows a text without a number, as replace() does, is stopped after it. This module is
imported where a template is rendered: other front processes do without jinja2.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_TURNS, MOST_S = 1_000_000, 2.0
MOST_SIZE, MOST_FORM = 4 << 20, 4096
NUMBER = re.compile(r"\d+")


class TooMuch(Exception):
    """A template has used up its budget."""


STOPPED = (TooMuch, SecurityError, MemoryError, RecursionError)
"""Exceptions that stop a template; others are about its input."""


class Budget(threading.local):
    """The budget of the template that this thread renders."""

    turns = 0
    ends = 0.0

    def begin(self) -> None:
        self.turns, self.ends = MOST_TURNS, time.monotonic() + MOST_S

    def turn(self) -> str:
        self.turns -= 1
        if self.turns < 0:
            raise TooMuch(f"it took more than {MOST_TURNS} turns of its loops")
        if time.monotonic() > self.ends:
            raise TooMuch(f"it took longer than {MOST_S:g} s")
        return ""


budget = Budget()


def checked(value: Any) -> Any:
    """Return a value that the template has made. Raises TooMuch for a large one."""
    if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > MOST_SIZE:
        raise TooMuch(f"it made something larger than {MOST_SIZE}")
    return value


def check_numbers(values: Iterable[Any]) -> None:
    """Check the arguments of a filter or method. Raises TooMuch."""
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_SIZE:
            raise TooMuch(f"it used a number beyond {MOST_SIZE}")


def check_form(text: str) -> None:
    """Check the widths in a format string. Raises TooMuch."""
    check_numbers(map(int, NUMBER.findall(text[:MOST_FORM])))
    if len(text) > MOST_FORM:
        raise TooMuch(f"it formatted with a text of more than {MOST_FORM} characters")


class TurnLimit(Extension):  # type: ignore[misc]
    """Looks at the budget in each turn of a loop and each call of a macro."""

    def filter_stream(self, stream: Iterable[Token]) -> Iterator[Token]:
        counts, first = False, False
        for token in stream:
            yield token
            if token.type == "block_begin":
                first = True
            elif first:
                first, counts = False, token.value in ("for", "macro", "call")
            elif token.type == "block_end" and counts:
                counts = False
                yield from _call("_turn", token.lineno)


def _call(name: str, line: int) -> Iterator[Token]:
    for kind, text in (("variable_begin", "{{"), ("name", name), ("lparen", "("), ("rparen", ")")):
        yield Token(line, kind, text)
    yield Token(line, "variable_end", "}}")


class GenerationBlock(Extension):  # type: ignore[misc]
    """`{% generation %}` marks what a model says, for training: here it is what is inside."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ConcatFilter(NodeTransformer):  # type: ignore[misc]
    """`a ~ b` is no operator to the sandbox: a filter, then, which is looked at."""

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, "_joined", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """The environment of all templates. Threads may share it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[TurnLimit, GenerationBlock, loopcontrols],
            cache_size=0,
        )
        filters: dict[str, Any] = self.filters
        filters["tojson"] = tojson
        filters |= {name: _bounded(work) for name, work in filters.items()}
        filters["_joined"] = lambda items: checked("".join(map(str, items)))
        self.globals |= {
            "_turn": budget.turn,
            "raise_exception": raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": PlainDict(),
            "namespace": PlainNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return ConcatFilter().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            check_form(left)
            check_numbers(
                right if isinstance(right, (list, tuple)) else [right]
            )  # "%*d" takes its width here
        return checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        found = super().wrap_str_format(value)
        if found is not None:
            check_form(value.__self__)
        return found

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_numbers((*args, *kwargs.values()))
        return checked(super().call(__context, __obj, *args, **kwargs))


def _check_product(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        check_numbers((left, right))
        if isinstance(right, int) and right > 64:
            raise TooMuch("it raised to a power beyond 64")
        return
    for many, times in ((left, right), (right, left)):
        if (
            isinstance(times, int)
            and isinstance(many, (str, bytes, list, tuple))
            and len(many) * times > MOST_SIZE
        ):
            raise TooMuch(f"it made something larger than {MOST_SIZE}")


def _bounded(work: Any) -> Any:
    """A filter whose numbers and result are looked at."""

    @wraps(work)  # with what Jinja has noted on it: whether it wants the environment
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_numbers((*args, *kwargs.values()))
        return checked(work(*args, **kwargs))

    return bounded


class PlainDict:
    """dict, without what hangs on the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(Namespace):  # type: ignore[misc]
    """namespace(), without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        given = dict(*args, **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it may not set {name!r}")


def raise_exception(message: str) -> None:
    """For templates that refuse what they are given."""
    raise jinja2.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own would write it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Return the text of a template. Raises TooMuch, and whatever a template can raise."""
    budget.begin()
    parts, size = [], 0
    for part in template.generate(**variables):
        size += len(part)
        if size > MOST_SIZE:
            raise TooMuch(f"it wrote more than {MOST_SIZE} characters")
        parts.append(part)
    return "".join(parts)
