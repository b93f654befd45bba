"""fastserve.errors: reasons travel as numbers, and nothing decides on the text of an error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import fastserve
from fastserve.errors import Kind, ModelError, Reason, ServeError, pack_status, unpack_status

PACKAGE = Path(fastserve.__file__).parent
NAMES = ("fault", "error")
# Sources without a match have no expression that is an error's text. Parsing them takes five times as long.
MENTIONS = re.compile(rf"\b({'|'.join(NAMES)})\b\s*\.\s*message\b|\bstr\(\s*({'|'.join(NAMES)})\b")
MATCHES = {"startswith", "endswith", "find", "index", "match", "fullmatch", "search"}
# They compare a text with the one told before, so as not to tell it twice.
TOLD_ONCE = {"repository/catalog.py", "repository/reconciler.py", "server/front.py"}


@pytest.mark.parametrize(("kind", "reason"), list(product(Kind, Reason)))
def test_status_holds_kind_and_reason(kind: Kind, reason: Reason) -> None:
    status = pack_status(ServeError(kind, "text", reason=reason))
    assert 0 < status < 1 << 32
    assert unpack_status(status) == (kind, reason)
    assert unpack_status(pack_status(kind, reason)) == (kind, reason)


@pytest.mark.parametrize("status", [0, 17, 255, 0x0100, 0xFF03, 0xFFFFFFFF])
def test_status_that_no_worker_sends_is_an_internal_error(status: int) -> None:
    assert unpack_status(status) == (Kind.INTERNAL, Reason.UNSPECIFIED)


def test_model_error_keeps_its_reason() -> None:
    assert ModelError(Kind.INTERNAL, "text", reason=Reason.OUTPUT_ROWS).reason is Reason.OUTPUT_ROWS


def is_text(node: ast.AST) -> bool:
    """Whether an expression is an error's text: `fault.message`, `str(error)`."""
    if isinstance(node, ast.Attribute) and node.attr == "message":
        named = node.value
    elif (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args
    ):
        named = node.args[0]
    else:
        return False
    return isinstance(named, ast.Name) and named.id in NAMES


def decisions(source: str) -> Iterator[int]:
    """Lines at which an error's text is compared or searched."""
    for node in ast.walk(ast.parse(source)) if MENTIONS.search(source) else ():
        looked_at: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            looked_at = [node]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MATCHES
        ):
            looked_at = [node.func.value, *node.args]
        if any(is_text(part) for one in looked_at for part in ast.walk(one)):
            yield node.lineno


def test_decisions_on_texts_are_found() -> None:
    source = """
if 'full' in fault.message: x
if error.message == FULL: y
FULL.match(str(error))
fault.message.find('x')
"""
    assert sorted(set(decisions(source))) == [2, 3, 4, 5]


def test_package_decides_nothing_on_the_text_of_an_error() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in decisions(path.read_text())
        if str(path.relative_to(PACKAGE)) not in TOLD_ONCE
    ]
    assert found == []
