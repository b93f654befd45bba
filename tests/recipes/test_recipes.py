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
HUB_MODEL = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
WORDS = "a cat kitten sleeps is asleep the tax due in may what day . !"
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]


def write_encoder(folder: Path, kind: str, **more: int) -> None:
    """Write an encoder of random weights, in place of one that a page downloads."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a bar has a thread that stays
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(TOKENS))
    transformers.BertTokenizerFast(
        vocab={word: number for number, word in enumerate(TOKENS)}
    ).save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(TOKENS), **more)
    name = f"{kind}ForSequenceClassification" if kind == "DistilBert" else f"{kind}Model"
    getattr(transformers, name)(config).save_pretrained(folder)


def prepare(page: str, folder: Path) -> dict[str, str]:
    """Put models in place that a page downloads; return what stands in for their names."""
    if page == "embeddings":
        size = {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
        write_encoder(folder / "models/minilm/1", "Bert", **size)
    if page == "transformers":
        write_encoder(folder / "sentiment", "DistilBert", dim=32, n_layers=1, n_heads=2, hidden_dim=32)
        return {HUB_MODEL: str(folder / "sentiment")}
    return {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe(page: Path, tmp_path: Path) -> None:
    if page.stem == "clients" and shutil.which("node") is None:
        pytest.skip("there is no node")
    needed = NEEDS.get(page.stem)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"there is no {needed}")
    with Kitchen(tmp_path, torch=page.stem in TORCH) as kitchen:
        kitchen.do(read_recipe(page, prepare(page.stem, tmp_path)))
        assert kitchen.done > 0


def test_every_recipe_is_listed() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [page.stem for page in RECIPES if f"({page.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_server_ends_its_block(page: Path) -> None:
    """It does not return: a reader who pastes the block would wait for what stands below it."""
    for block in read_recipe(page, {}).blocks:
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
