"""docs/moving-from-triton.md against the schema and against what is refused: every field has its row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fastserve.devices.inventory import MACHINE, VisibleDevice
from fastserve.repository.triton_config.completion import fill_defaults
from fastserve.repository.triton_config.messages import TritonConfig, config_schema
from fastserve.repository.triton_config.validation import ignored_fields, refusals
from fastserve.settings import convert
from fastserve.settings.text_proto import TextField

PAGE = Path(__file__).resolve().parents[3] / "docs" / "moving-from-triton.md"
STATES = ("works", "mapped", "partly", "idle", "refused")


def read_rows() -> dict[str, str]:
    table = PAGE.read_text().split("<!-- fields: config.pbtxt -->")[1].split("<!-- end -->")[0]
    found = re.findall(r"^\| `([a-z0-9_.]+)` \| (\w+) \|", table, re.MULTILINE)
    assert len(found) == len(dict(found)) == table.count("\n") - 3
    return dict(found)


def leaves(schema: Mapping[str, TextField], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in schema.items():
        inner = field.fields["value"] if field.entries else field
        if inner.fields:
            yield from leaves(inner.fields, (*above, name))
        else:
            yield (*above, name)


ROWS = read_rows()
LEAVES = sorted(leaves(config_schema()))


def row_of(leaf: tuple[str, ...]) -> str:
    """The row that speaks for a field; exactly one does."""
    found = [".".join(leaf[:n]) for n in range(1, len(leaf) + 1) if ".".join(leaf[:n]) in ROWS]
    assert len(found) == 1, f"{'.'.join(leaf)} has the rows {found}"
    return found[0]


def given(schema: Mapping[str, TextField], path: tuple[str, ...]) -> dict[str, Any]:
    """Plain values of a message where nothing but the field at `path` has been given."""
    field = schema[path[0]]
    inner = field.fields["value"] if field.entries else field
    scalars = {"string": "x", "bool": True, "enum": [*inner.names, *inner.names][-1:]}
    value: Any = scalars.get(inner.kind, 1)
    if inner.kind == "enum":
        value = value[0]
    if inner.kind == "message":
        value = given(inner.fields, path[1:]) if len(path) > 1 else {}
    if field.entries:
        key = 1 if field.fields["key"].kind == "uint64" else "k"
        return {path[0]: {key: value}}
    return {path[0]: [value] if field.repeated else value}


def test_states_and_rows() -> None:
    assert set(ROWS.values()) == set(STATES)
    assert {row_of(leaf) for leaf in LEAVES} == set(ROWS)


@pytest.mark.parametrize("leaf", LEAVES, ids=".".join)
def test_what_is_refused_is_refused_and_nothing_else(
    leaf: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [VisibleDevice(number, f"GPU-{number}", "any", 1 << 34, str(number)) for number in range(2)]
    monkeypatch.setattr(type(MACHINE), "devices", lambda _: gpus)
    row, state = row_of(leaf), ROWS[row_of(leaf)]
    refused, passed_over = zip(*(judge(leaf, backend) for backend in ("python", "onnxruntime")), strict=True)
    if state == "refused":
        assert all(any(name.startswith(row) for name in names) for names in refused), refused
    elif state == "idle":
        assert all(any(name.startswith(row) for name in names) for names in passed_over), passed_over
    elif state != "partly":
        assert [] in [[*a, *b] for a, b in zip(refused, passed_over, strict=True)], "no backend takes it up"


def judge(leaf: tuple[str, ...], backend: str) -> tuple[list[str], list[str]]:
    """Return the fields that are refused and those that are idle, without the numbers of repeated fields."""
    raw = given(config_schema(), leaf)
    if leaf[0] not in ("backend", "platform", "ensemble_scheduling"):
        raw["backend"] = backend
    config = fill_defaults(convert(raw, TritonConfig, "m"), "m")
    refused, passed_over = (
        [re.sub(r"\[\d+\]", "", text) for text in f(config)] for f in (refusals, ignored_fields)
    )
    return refused, passed_over
