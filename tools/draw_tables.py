"""Draws the state machines of docs/architecture.md from the tables the code runs on.

tools/draw_tables.py            writes the drawings
tools/draw_tables.py --check    exit code 1 when the page shows something else than the tables
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from fastserve._ext.batch_ring import moves
from fastserve.repository.version import TRANSITIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
PLACE = "<!-- table: {name} -->\n(.*?)<!-- end -->"


def slots() -> Iterable[str]:
    for (state, event), targets in moves().items():
        for target in sorted(targets):
            yield f"{state} --> {target}: {event}"


def versions() -> Iterable[str]:
    for state, targets in TRANSITIONS.items():
        for target in sorted(targets, key=lambda state: state.value):
            yield f"{state.name} --> {target.name}"


def drawn(lines: Iterable[str]) -> str:
    return "```mermaid\nstateDiagram-v2\n" + "".join(f"    {line}\n" for line in lines) + "```\n"


def page_with_drawings(text: str) -> str:
    for name, lines in (("slots", slots()), ("versions", versions())):
        drawing = f"<!-- table: {name} -->\n{drawn(lines)}<!-- end -->"
        place = re.compile(PLACE.format(name=name), re.DOTALL)
        text, found = place.subn(lambda _, drawing=drawing: drawing, text)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has no place for {name}")
    return text


def main() -> int:
    text = PAGE.read_text()
    wanted = page_with_drawings(text)
    if sys.argv[1:] == ["--check"]:
        return 0 if text == wanted else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
