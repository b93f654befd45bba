"""`suffix` of a completion: the prompts of models whose vocabulary has infill tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from fastserve.codec.generation import Info
from fastserve.serving.text.models import INFILL
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.serving import Local
from tests.late import Late
from tests.serving.text.tokenizers_of import byte_level, save
from tests.text_rig import Scripted

openai = Late("openai")
PREFIX, SUFFIX = "def f(x): ", " + 1"
INFO = Info(vocab_size=4096, tokenizer="folder", slots=8, max_prompt_tokens=64, max_tokens=128)


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    made = Tokenizer.from_str(byte_level().to_str())
    for names in INFILL:
        made.add_special_tokens(list(names))
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, library: Tokenizer) -> Iterator[Local]:
    folder = save(library, tmp_path_factory.mktemp("model"))
    with Local({"m1": Scripted([(40, None)], info=INFO)}, TextgenOptions(), folder=folder) as opened:
        yield opened


@pytest.fixture
def client(server: Local) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(library: Tokenizer, prefix: str, *, begin: bool = True) -> list[int]:
    """The prompt in the order of the models' cards: prefix, suffix, middle."""
    before, between, middle = (library.token_to_id(name) for name in INFILL[0])
    plain = [library.encode(text, add_special_tokens=False).ids for text in (prefix, SUFFIX)]
    return [*([0] if begin else []), before, *plain[0], between, *plain[1], middle]


def test_the_prompt_has_the_texts_between_the_tokens(
    client: openai.OpenAI, server: Local, library: Tokenizer
) -> None:
    engine: Any = server.models["m1"]
    found = client.completions.create(model="m1", prompt=PREFIX, suffix=SUFFIX, max_tokens=2)
    assert engine.seen[-1].ids == expected(library, PREFIX)
    assert found.usage.prompt_tokens == len(expected(library, PREFIX))
    client.completions.create(model="m1", prompt=["", PREFIX], suffix=SUFFIX, max_tokens=2)
    assert [one.ids for one in engine.seen[-2:]] == [expected(library, ""), expected(library, PREFIX)]
    bare: Any = {"add_special_tokens": False}
    list(client.completions.create(
        model="m1", prompt=PREFIX, suffix=SUFFIX, max_tokens=2, stream=True, extra_body=bare
    ))  # fmt: skip
    assert engine.seen[-1].ids == expected(library, PREFIX, begin=False)
    client.completions.create(model="m1", prompt=PREFIX, suffix="", max_tokens=2)
    assert engine.seen[-1].ids == library.encode(PREFIX).ids


@pytest.mark.parametrize("names", INFILL)
def test_each_form_of_the_tokens_is_known(tmp_path: Path, names: tuple[str, ...]) -> None:
    made = Tokenizer.from_str(byte_level().to_str())
    made.add_special_tokens(list(names))
    engine = Scripted([(40, None)], info=INFO)
    with Local({"m1": engine}, TextgenOptions(), folder=save(made, tmp_path)) as server:
        body = {"model": "m1", "prompt": "a", "suffix": "b", "max_tokens": 1}
        assert server.post("/v1/completions", body).status == 200
    a, b = (made.encode(text, add_special_tokens=False).ids for text in "ab")
    marks = [made.token_to_id(name) for name in names]
    assert engine.seen[-1].ids == [0, marks[0], *a, marks[1], *b, marks[2]]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "x" * 200_000}, "suffix"),
        ({"suffix": "x y " * 100}, "prompt"),
        ({"prompt": ["a", "x y " * 100]}, "prompt[1]"),
        ({"prompt": "x y " * 100}, "prompt"),
        ({"prompt": ["x y " * 12] * 2, "suffix": "x y " * 12}, "prompt[0]"),  # together
    ],
)
def test_texts_that_are_too_long_are_named(server: Local, more: Any, param: str) -> None:
    body = {"model": "m1", "prompt": PREFIX, "suffix": SUFFIX, **more}
    error = server.post("/v1/completions", body).json["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
