"""Check that no file has more than 1,200 lines and no function of the package more than 60.

Docstrings and blank lines of a function do not count. Generated tables (*_table.h) have no limit.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 1200
FUNCTION_LINES = 60


def files(*patterns: str) -> list[Path]:
    found = (path for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(path for path in found if not path.name.endswith("_table.h"))


def long_files(paths: list[Path], limit: int) -> Iterator[str]:
    for path in paths:
        lines = len(path.read_text().splitlines())
        if lines > limit:
            yield f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}"


def long_functions(path: Path) -> Iterator[str]:
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = code_lines(node, lines)
            if count > FUNCTION_LINES:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield f"{place}: {node.name} has {count} lines, at most {FUNCTION_LINES}"


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    start = (first.end_lineno or first.lineno) if documented else node.lineno - 1
    return sum(bool(line.strip()) for line in lines[start : node.end_lineno])


def main() -> int:
    package = files("fastserve/**/*.py")
    others = files("ext/*.pyx", "ext/*.pxd", "ext/include/*.h", "tests/**/*.py", "bench/**/*.py")
    faults = [
        *long_files(package + others, FILE_LINES),
        *(fault for path in package for fault in long_functions(path)),
    ]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
