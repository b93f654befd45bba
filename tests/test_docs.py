"""The documentation holds together: links lead somewhere, drawings are what the tables say."""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastserve.metrics import names
from fastserve.settings import tensorflow

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_nothing_leads_to_the_namesake_on_the_package_index() -> None:
    """Another project has the name there: pages, errors and written files install a wheel by its path."""
    paths = [
        *PAGES,
        *(path for place in ("fastserve", "examples", "deploy") for path in (ROOT / place).rglob("*")),
    ]
    texts = {
        path: path.read_text()
        for path in paths
        if path.suffix in (".md", ".py", ".yaml", ".txt", "") and path.is_file()
    }
    by_name = re.compile(r"(?:pip install|uvx)(?: -\S+)* ['\"]?fastserve(?![-_\w/]*\.whl)")
    assert [path.relative_to(ROOT).as_posix() for path, text in texts.items() if by_name.search(text)] == []


def test_drawings_are_the_tables() -> None:
    done = subprocess.run([sys.executable, "tools/draw_tables.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run tools/draw_tables.py"


def test_every_flag_of_tensorflow_servings_is_told() -> None:
    page = (ROOT / "docs/moving-from-tensorflow-serving.md").read_text()
    told = set(re.findall(r"`--([a-z]\w*_\w+|port|version)\b", page))
    known = {*tensorflow._INT_FLAGS, *tensorflow._TEXT_FLAGS, *tensorflow._BOOL_FLAGS}
    known |= {*tensorflow._IDLE_FLAGS, *tensorflow._UNBUILT_FLAGS}
    assert told == known


def test_the_readmes_library_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(next(block for block in blocks if "BatchedService" in block))
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]\n", done.stderr


def test_the_librarys_examples_run(tmp_path: Path) -> None:
    """Those of docs/library.md: with await, and for callers who block."""
    text = (ROOT / "docs/library.md").read_text()
    blocks = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "__main__" in one]
    assert len(blocks) == 2
    for block in blocks:
        example = tmp_path / "example.py"
        example.write_text(block)
        done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
        assert done.stdout == "9\n[0, 1, 4, 9, 16, 25, 36, 49, 64, 81]\n", done.stderr


def test_the_dashboard_asks_for_metrics_there_are() -> None:
    board = json.loads((ROOT / "docs/grafana/fastserve.json").read_text())
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\bfastserve_\w+", target["expr"])
    }
    assert asked - set(names.CATALOGUE) == set()
    assert len(asked) > 10
    assert {"fastserve_text_first_token_seconds", "fastserve_text_waiting"} <= asked
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_texts_of_troubleshooting_are_those_of_the_server() -> None:
    """Each quoted text that begins a row is in the package's source, but for the values in it."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "fastserve").rglob("*.py"))
    wild = r"\.\.\.|\d+(?:\.\d+)*(?::\d+)?|\bonnx\b|\bfloat64\b|\bint64\b"
    quoted = [
        text
        for part in page.split("\n## ")[1:3]
        for row in part.splitlines()
        if row.startswith("| ")
        for text in re.findall(r"`([^`]+)`", row.split(" | ")[0 if part.startswith("The server") else 1])
    ]
    assert len(quoted) > 20
    library = page.split("## The library and the clients")[1].split("\n## ")[0]
    quoted += re.findall(r"^\| `([^`]+)`", library, re.MULTILINE)
    for text in quoted:
        pieces = [piece for piece in re.split(wild, text) if len(piece.strip()) > 3]
        assert all(piece.strip(" :\"'[]") in source for piece in pieces if "in use" not in piece), text


def test_the_layers_of_the_architecture_are_those_that_are_linted() -> None:
    """The line of packages in docs/architecture.md is the import linter's list, but for `__main__`."""
    page = (ROOT / "docs/architecture.md").read_text()
    shown = re.search(r"^    (cli > .*\n(?:    .*\n)*)", page, re.M)
    contract = re.search(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert shown is not None
    assert contract is not None
    layers = [sorted(re.findall(r"\w+", line)) for line in contract[1].splitlines()]
    assert layers.pop(0) == ["__main__"]
    assert [sorted(re.findall(r"\w+", layer)) for layer in shown[1].split(">")] == layers


def defined_names(source: str) -> set[str]:
    """Names of classes in a module, and what it imports or assigns."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def undefined_names(names: set[str]) -> set[str]:
    """Return those that are none of Python's, of the package's and of the examples'."""
    # A reader's own class, RPCs, and torch's error.
    left = names - {*dir(builtins), "Mine", "Predict", "ModelStreamInfer", "OutOfMemoryError"}
    for pattern in (
        "tests/conformance/*.py",
        "examples/**/*.py",
        "fastserve/_ext/*.pyi",
        "fastserve/**/*.py",
    ):
        for path in ROOT.glob(pattern):
            source = path.read_text()
            if not left.isdisjoint(re.findall(r"\w+", source)):  # a tree takes five times as long
                left -= defined_names(source)
    return left


@pytest.mark.parametrize("name", ["writing-a-dialect", "writing-a-backend"])
def test_classes_named_for_authors_exist(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text()
    code = [*re.findall(r"```python\n(.*?)```", page, re.S), *re.findall(r"(?<!`)`([^`\n]+)`", page)]
    texts = [re.sub(r"(\"[^\"\n]*\"|'[^'\n]*'|#.*)", "", text) for text in code]
    named = {word for text in texts for word in re.findall(r"(?<![\w./*:-])[A-Z][a-z]\w*(?![\w/-])", text)}
    own = {word for text in code for word in re.findall(r"^class (\w+)", text, re.M)}
    assert not undefined_names(named - own)


def test_each_threat_names_a_test_that_exists() -> None:
    page = (ROOT / "docs/security.md").read_text()
    section = page.split("\n## Threats\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.strip("|").split(" | ")]
        for row in section.splitlines()
        if row.startswith("| ")
    ]
    rows = [row for row in rows if row[0] != "who"]
    assert len(rows) > 35
    shown = ""
    for row in rows:
        assert len(row) == 4, row
        shown = shown if row[3] == "the same" else row[3]
        files = re.findall(r"`(tests/[\w/]+\.py)`", shown)
        missing = [file for file in files if not (ROOT / file).exists()]
        assert files or re.match(r"decision \d{4}", shown), row
        assert missing == [], row
    assert len({(row[0], row[1]) for row in rows}) == len(rows)
