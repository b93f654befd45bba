"""Draws the state machines of the docs from the tables the code runs on.

tools/draw_tables.py            writes the drawings
tools/draw_tables.py --check    exit code 1 when the page shows something else than the tables
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from fastserve._ext.batch_ring import moves
from fastserve.net.http2.stream import TRANSITIONS as STREAM_TRANSITIONS
from fastserve.repository.version import TRANSITIONS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = "<!-- table: {name} -->\n(.*?)<!-- end -->"


def slots() -> Iterable[str]:
    for (state, event), targets in moves().items():
        for target in sorted(targets):
            yield f"{state} --> {target}: {event}"


def versions() -> Iterable[str]:
    for state, targets in TRANSITIONS.items():
        for target in sorted(targets, key=lambda state: state.value):
            yield f"{state.name} --> {target.name}"


def streams() -> Iterable[str]:
    for (state, event), target in STREAM_TRANSITIONS.items():
        yield f"{state.name} --> {target.name}: {event.name}"


DRAWINGS = {"architecture.md": {"slots": slots, "versions": versions}, "wire-http2.md": {"streams": streams}}


def drawn(lines: Iterable[str]) -> str:
    return "```mermaid\nstateDiagram-v2\n" + "".join(f"    {line}\n" for line in lines) + "```\n"


def page_with_drawings(page: str, text: str) -> str:
    for name, lines in DRAWINGS[page].items():
        drawing = f"<!-- table: {name} -->\n{drawn(lines())}<!-- end -->"
        place = re.compile(PLACE.format(name=name), re.DOTALL)
        text, found = place.subn(lambda _, drawing=drawing: drawing, text)
        if found != 1:
            raise SystemExit(f"{page} has no place for {name}")
    return text


def main() -> int:
    good = True
    for page in DRAWINGS:
        text = (DOCS / page).read_text()
        wanted = page_with_drawings(page, text)
        good = good and text == wanted
        if sys.argv[1:] != ["--check"]:
            (DOCS / page).write_text(wanted)
    return 0 if good or sys.argv[1:] != ["--check"] else 1


if __name__ == "__main__":
    sys.exit(main())
