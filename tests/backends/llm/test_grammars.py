"""Structured answers, of the demo's tokens: every answer that ends by itself belongs to its grammar."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.backends.llm import grammars as module
from fastserve.backends.llm.engine import BatchEngine
from fastserve.backends.llm.grammars import Grammars
from fastserve.backends.llm.numpy_model import open_engine
from fastserve.codec.generation import Finish, Grammar, GrammarKind
from fastserve.demo import demo_repository
from fastserve.errors import Kind, ServeError
from fastserve.settings.model_options import TextOptions
from tests.backends.llm.outs import Heard, ask, run
from tests.late import Late
from tests.text_rig import copy_small

jsonschema, tokenizers = Late("jsonschema"), Late("tokenizers")
FOLDER = Path(demo_repository()) / "scribe" / "1"
PROMPT = [5, 6, 7]
STRING = {"type": "string", "maxLength": 8}
SCHEMAS: list[Any] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -5, "maximum": 1200},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"enum": ["red", 7, None, {"a": [1]}]},
    {"const": {"b": 'é\n"quoted"'}},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, STRING], "items": False, "minItems": 2},
    {
        "type": "object",
        "properties": {"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": STRING, "c": {"type": "null"}},
        "required": ["c"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "leaf": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "minItems": 1,
        "maxItems": 2,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
]
OPEN = {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": STRING}, "required": ["x"]}]}
"""It may have other properties. Their names end where a model that was trained ends them."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model with the demo's tokens."""
    return copy_small(tmp_path_factory.mktemp("small") / "scribe") / "1"


@pytest.fixture
def engine(small: Path) -> Iterator[BatchEngine]:
    """In numpy, in this process."""
    engine = open_engine(small, TextOptions(max_new_tokens=400, max_sequences=8))
    yield engine
    assert engine._rows.free == 8
    assert not any(one.users for one in grammars_of(engine)._compiled.values())
    assert not grammars_of(engine)._matchers
    engine.close()


def grammars_of(engine: BatchEngine) -> Grammars:
    assert engine._grammars is not None
    return engine._grammars


def text_of(tokens: list[int]) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return str(tokenizer.decode(tokens[:-1], skip_special_tokens=False))


def answers(engine: BatchEngine, asked: list[Grammar], **settings: Any) -> list[str]:
    """Texts of answers that have ended by themselves; of each grammar one."""
    heard = run(
        engine,
        [
            ask(rid, PROMPT, grammar=one, max_new_tokens=400, do_sample=True, seed=rid, **settings)
            for rid, one in enumerate(asked)
        ],
    )
    assert [heard.ended[rid] for rid in range(len(asked))] == [Finish.EOS] * len(asked)
    return [text_of(heard.tokens[rid]) for rid in range(len(asked))]


def schema(document: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(document))


def check_schemas(engine: BatchEngine, asked: list[Any]) -> None:
    found = answers(engine, [schema(one) for one in asked], temperature=1.3)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for document, text in zip(asked, found, strict=True):
        jsonschema.validate(json.loads(text), document, format_checker=checker)


def test_answers_belong_to_their_schemas(engine: BatchEngine) -> None:
    """Three of each schema, eight at a time, by a model that has never seen JSON."""
    check_schemas(engine, [one for one in SCHEMAS for _ in range(3)])


def test_an_answer_of_the_demo_belongs_to_an_open_schema() -> None:
    engine = open_engine(FOLDER, TextOptions(max_new_tokens=400, max_sequences=8))
    check_schemas(engine, [OPEN] * 3)
    engine.close()


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", "(yes|no)-[0-9]{3}/é", "(yes|no)-[0-9]{3}/é"),
        ("choice", '["red","gr\\"een/","blüe\\n"]', 'red|gr"een/|blüe\n'),
        ("grammar", 'start: "a" (B | "c")~3\nB: /b+/', "a(b+|c){3}"),
        ("grammar", 'root ::= "x" [0-9] y\ny ::= "y" | "z" y', "x[0-9]z*y"),
    ],
)
def test_other_grammars(engine: BatchEngine, kind: GrammarKind, text: str, pattern: str) -> None:
    for found in answers(engine, [Grammar(kind, text)] * 4, temperature=1.0):
        assert re.fullmatch(pattern, found), found


def test_an_end_of_sequence_ends_an_answer_that_ignores_it(engine: BatchEngine) -> None:
    assert answers(engine, [Grammar("choice", '["a"]')], ignore_eos=True) == ["a"]


def test_company_changes_no_answer(engine: BatchEngine) -> None:
    """Sequences with and without grammars in one batch have the tokens that they have alone."""
    grammars = [None, schema({"enum": ["left", "right"]}), None, Grammar("regex", "[a-z ]{20,30}")]
    requests = [
        ask(rid, PROMPT, grammar=one, max_new_tokens=30, do_sample=True, seed=rid)
        for rid, one in enumerate(grammars)
    ]
    together = run(engine, requests).tokens
    for request in requests:
        assert run(engine, [request]).tokens[request.rid] == together[request.rid]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "nope"}', "the json schema cannot be used: Invalid type: nope"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented keys"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "does not fetch"),
        ("json_schema", '{"type": ', "the json schema cannot be used"),
        ("json_schema", '{"enum": []}', "the json schema cannot be used"),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: nothing", "the grammar cannot be used"),
        ("grammar", "?", "the grammar cannot be used"),
    ],
)
def test_a_grammar_that_cannot_be_used(engine: BatchEngine, kind: GrammarKind, text: str, words: str) -> None:
    heard = run(engine, [ask(0, PROMPT, grammar=Grammar(kind, text)), ask(1, PROMPT, max_new_tokens=2)])
    (extra,) = heard.extras[0]
    assert (heard.ended[0], extra.kind) == (Finish.FAILED, Kind.INVALID_ARGUMENT.value)
    assert words in extra.message
    assert len(extra.message) < module.MOST_FAULT + 100
    assert heard.ended[1] == Finish.LENGTH


@pytest.mark.parametrize("limit", ["MOST_ITEMS", "MOST_STEP_ITEMS"])
def test_a_grammar_that_grows_beyond_its_limits(
    engine: BatchEngine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """It fails its own sequence, with the reason, and no other."""
    monkeypatch.setattr(module, limit, 3)
    wide = schema({"anyOf": [{"type": "array", "items": {"const": n}} for n in range(50)]})
    heard = run(engine, [ask(0, PROMPT, grammar=wide), ask(1, PROMPT, max_new_tokens=2)])
    (extra,) = heard.extras[0]
    assert heard.ended == {0: Finish.FAILED, 1: Finish.LENGTH}
    assert "grammar" in extra.message


def test_an_ambiguous_grammar_ends_before_its_masks_take_long(engine: BatchEngine) -> None:
    """A mask is ended by the count of its items, not by the clock; llguidance's own limit let it go on."""
    grammar = Grammar("lark", 'start: s "☃"\ns: s s s | s s | /[a-z ]/ | ""')
    asked = ask(0, PROMPT, grammar=grammar, max_new_tokens=20, do_sample=True, seed=0)
    heard = run(engine, [asked, ask(1, PROMPT, max_new_tokens=20)])
    assert heard.ended[0] == Finish.FAILED
    assert heard.ended[1] != Finish.FAILED
    assert "Too many items" in heard.extras[0][-1].message


class Gate:
    """Compilation that waits until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        make = Grammars._make

        def wait(grammars: Grammars, grammar: Grammar) -> Any:
            assert self.open.wait(60)
            return make(grammars, grammar)

        monkeypatch.setattr(Grammars, "_make", wait)


def test_nobody_waits_for_the_grammar_of_another(
    engine: BatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, heard = Gate(monkeypatch), Heard()
    engine.submit(ask(0, PROMPT, grammar=Grammar("choice", '["a"]')))
    engine.submit(ask(1, PROMPT, max_new_tokens=3))
    while 1 not in heard.ended:
        assert engine.step(heard)
    assert heard.ended == {1: Finish.LENGTH}
    assert engine.step(heard), "it looks again soon"
    gate.open.set()
    while engine.pending():
        engine.step(heard)
    assert heard.ended[0] == Finish.EOS


def test_a_sequence_that_is_cancelled_while_its_grammar_is_compiled(
    engine: BatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, heard = Gate(monkeypatch), Heard()
    engine.submit(ask(0, PROMPT, grammar=Grammar("choice", '["a"]')))
    engine.cancel(0, Finish.CANCELLED)
    engine.step(heard)
    assert (heard.ended, engine.pending()) == ({0: Finish.CANCELLED}, 0)
    gate.open.set()
    assert not engine.step(heard)


def test_grammars_that_are_held_are_bounded(engine: BatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD", 2)
    heard = Heard()
    for rid, word in enumerate(("a", "b", "b")):
        engine.submit(ask(rid, PROMPT, grammar=Grammar("choice", f'["{word}"]')))
    with pytest.raises(ServeError, match="2 different grammars are in use already") as caught:
        engine.submit(ask(3, PROMPT, grammar=Grammar("choice", '["c"]')))
    assert caught.value.kind is Kind.RESOURCE_EXHAUSTED
    while engine.pending():
        engine.step(heard)
    assert answers(engine, [Grammar("choice", '["c"]')]) == ["c"]


def test_characters_of_grammars_are_bounded(engine: BatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD_CHARACTERS", 20)
    heard = Heard()
    engine.submit(ask(0, PROMPT, grammar=Grammar("regex", "a" * 15)))
    engine.submit(ask(1, PROMPT, grammar=Grammar("regex", "a" * 15)))  # the same one
    with pytest.raises(ServeError, match="of 15 characters are in use, allowed: 20") as caught:
        engine.submit(ask(2, PROMPT, grammar=Grammar("regex", "b" * 6)))
    assert caught.value.kind is Kind.RESOURCE_EXHAUSTED
    engine.submit(ask(3, PROMPT, grammar=Grammar("regex", "b" * 5)))
    while engine.pending():
        engine.step(heard)
    assert text_of(heard.tokens[3]) == "bbbbb"
    monkeypatch.setattr(module, "MOST_CACHED_CHARACTERS", 20)
    assert answers(engine, [Grammar("regex", "c" * 12)]) == ["c" * 12]
    assert [one.text for one in grammars_of(engine)._compiled] == ["bbbbb", "c" * 12]


def test_the_shortest_grammar_is_compiled_first(engine: BatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of long ones, each of which may take seconds, delays a short one by one of them."""
    gate, heard, order, begun = Gate(monkeypatch), Heard(), list[str](), threading.Event()
    make = Grammars._make

    def note(grammars: Grammars, grammar: Grammar) -> Any:
        order.append(grammar.text)
        begun.set()
        return make(grammars, grammar)

    monkeypatch.setattr(Grammars, "_make", note)
    texts = ["x{1,2}" * 9, "y{1,2}" * 8, "z{1,2}" * 7, "w", "z"]
    for rid, text in enumerate(texts):
        engine.submit(ask(rid, PROMPT, grammar=Grammar("regex", text)))
        assert begun.wait(60)
    engine.cancel(2, Finish.CANCELLED)
    engine.step(heard)  # nobody wants it any more: it is not compiled
    gate.open.set()
    while engine.pending():
        engine.step(heard)
    assert order == [texts[0], "w", "z", texts[1]]
    assert heard.ended == {rid: Finish.CANCELLED if rid == 2 else Finish.EOS for rid in range(5)}


def test_grammars_that_are_kept_are_bounded(engine: BatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CACHED", 2)
    for word in "abcba":
        assert answers(engine, [Grammar("choice", f'["{word}"]')]) == [word]
    assert [one.text for one in grammars_of(engine)._compiled] == ['["b"]', '["a"]']


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Grammars.open(tmp_path, 10, [0], 1) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Grammars.open(tmp_path, 10, [], 1) is None


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not the client's fault, and the client is told nothing of it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars.open(tmp_path, 10, [0], 1)
    assert grammars is not None
    fault = grammars.compile(Grammar("choice", '["a"]')).fault()
    assert fault is not None
    assert fault.kind is Kind.INTERNAL
    assert str(tmp_path) not in fault.message
    assert "cannot be compiled" in caplog.text
    grammars.close()
