"""Every page of docs/recipes, and the quickstart and clients pages, done by their words."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.recipes.page import Kitchen, compare, read_recipe, split_commands

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")
PAGES = [FOLDER.parent / "quickstart.md", FOLDER.parent / "clients.md", *RECIPES]
TORCH = {"pytorch", "transformers", "embeddings"}
# What a page imports besides the suite's own packages: `make test-extras` has it.
NEEDS = {"xgboost": "xgboost", "tensorflow": "tensorflow", "fastapi": "fastapi", "notebook": "nbclient"}
SERVING = "fastserve run ", "fastserve serve "


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe(page: Path, tmp_path: Path) -> None:
    if page.stem == "clients" and shutil.which("node") is None:
        pytest.skip("there is no node")
    needed = NEEDS.get(page.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"there is no {needed}")
    with Kitchen(tmp_path, torch=page.stem in TORCH) as kitchen:
        kitchen.do(read_recipe(page))
        assert kitchen.done > 0


def test_every_recipe_is_listed() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [page.stem for page in RECIPES if f"({page.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_server_ends_its_block(page: Path) -> None:
    """It does not return: a reader who pastes the block would wait for what stands below it."""
    for block in read_recipe(page).blocks:
        commands = split_commands(block.text) if block.language == "sh" else []
        serving = [number for number, text in enumerate(commands, 1) if text.startswith(SERVING)]
        assert serving in ([], [len(commands)]), block.text


@pytest.mark.parametrize(
    ("got", "shown"),
    [
        ("[0.12346, 2]\n", "[0.1235, 2]"),
        ('{"a":1,"id":"x7"}', '{"a":1,"id":"..."}'),
        ("one\ntwo", "one\n two\n"),
    ],
)
def test_outputs_alike(got: str, shown: str) -> None:
    compare(got, shown)


@pytest.mark.parametrize(("got", "shown"), [("[0.13, 2]", "[0.12, 2]"), ("ab", "a"), ("[1]", "[2]")])
def test_outputs_that_differ(got: str, shown: str) -> None:
    with pytest.raises(AssertionError):
        compare(got, shown)
