"""Text to tokens and back: by the library as a whole, and by increments that add up to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.errors import Kind, ServeError
from fastserve.serving.text import NoTokenizer
from fastserve.serving.text.tokenizer import FolderTokenizer, Piece, Tokenizer, detokenizer_of, load_tokenizer
from tests.serving.text import tokenizers_of
from tests.serving.text.tokenizers_of import ALL, save

KINDS = pytest.mark.parametrize("kind", list(ALL))


def load(folder: Path, kind: str) -> Tokenizer:
    return load_tokenizer("folder", save(ALL[kind](), folder), "m")


def parts_of(kind: str, ids: list[int], *, special: bool) -> list[str]:
    library = ALL[kind]()
    added = library.get_added_tokens_decoder()
    skip = frozenset() if special else frozenset(i for i, token in added.items() if token.special)
    detokenizer = detokenizer_of(library)(skip)
    return [*(detokenizer.add(token) for token in ids), detokenizer.end()]


@KINDS
@given(text=st.text(max_size=40), special=st.booleans())
def test_increments_of_a_text_add_up_to_it(kind: str, text: str, special: bool) -> None:
    library = ALL[kind]()
    ids = library.encode(text).ids
    parts = parts_of(kind, ids, special=special)
    whole = library.decode(ids, skip_special_tokens=not special)
    assert "".join(parts) == whole
    if "\N{REPLACEMENT CHARACTER}" not in whole:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(data=st.data())
def test_any_tokens_at_all_add_up_to_their_bytes(data: st.DataObject) -> None:
    """Models write what is no UTF-8 too."""
    library = tokenizers_of.byte_level()
    ids = data.draw(st.lists(st.integers(0, library.get_vocab_size() + 3), max_size=30))
    for special in (True, False):
        whole = library.decode(ids, skip_special_tokens=not special)
        assert "".join(parts_of("byte_level", ids, special=special)) == whole


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
@given(data=st.data())
def test_any_tokens_without_bytes_add_up(kind: str, data: st.DataObject) -> None:
    library = ALL[kind]()
    plain = [token for text, token in library.get_vocab().items() if not text.startswith("<0x")]
    ids = data.draw(st.lists(st.sampled_from(sorted(plain)), max_size=30))
    for special in (True, False):
        whole = library.decode(ids, skip_special_tokens=not special)
        assert "".join(parts_of(kind, ids, special=special)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_comes_whole(kind: str) -> None:
    library = ALL[kind]()
    ids = library.encode("🎉☃", add_special_tokens=False).ids
    assert len(ids) > 2
    assert [part for part in parts_of(kind, ids, special=False) if part] == ["🎉", "☃"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_broken_bytes_do_not_hold_an_answer_back_for_ever(kind: str) -> None:
    library = ALL[kind]()
    name = "ÿ" if kind == "byte_level" else "<0xFF>"
    parts = parts_of(kind, [library.token_to_id(name)] * 100, special=False)
    assert "".join(parts) == "�" * 100
    assert parts[20:40] != [""] * 20


def test_a_token_that_ends_within_a_character_is_a_replacement_at_the_end() -> None:
    library = tokenizers_of.byte_level()
    ids = library.encode("☃", add_special_tokens=False).ids[:-1]
    *parts, last = parts_of("byte_level", ids, special=False)
    assert ("".join(parts), last) == ("", "�")


def test_special_tokens_are_text_where_that_is_wanted(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "byte_level")
    ids = tokenizer.encode("Hi <tool>")
    assert ids[0] == 0
    assert tokenizer.specials == {0, 1}
    assert tokenizer.encode("Hi <tool>", special=False) == ids[1:]
    assert (tokenizer.decode(ids), tokenizer.decode(ids, special=True)) == ("Hi <tool>", "<s>Hi <tool>")
    assert (tokenizer.token_text(0), tokenizer.token_text(ids[1])) == ("<s>", "H")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokens_that_are_parts_of_characters_have_their_bytes(tmp_path: Path, kind: str) -> None:
    tokenizer = load(tmp_path, kind)
    ids = tokenizer.encode("🎉☃", special=False)
    parts = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(parts) == "🎉☃".encode()
    assert len(parts) > 2


def test_pieces_are_slices_of_the_text(tmp_path: Path) -> None:
    tokenizer, text = load(tmp_path, "byte_level"), "the ☃ earth"
    pieces = tokenizer.pieces(text)
    assert [piece.id for piece in pieces] == tokenizer.encode(text)
    assert all(piece.text == text[piece.start : piece.stop] for piece in pieces)
    assert pieces[0] == Piece(0, "", 0, 0)


def test_halves_of_surrogate_pairs_are_no_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "byte_level")
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a�b"


def test_one_token_a_word() -> None:
    tokenizer = load_tokenizer("words", Path(), "m")
    first, second, again = tokenizer.encode(" one two\n one ")
    assert first == again != second
    assert [(piece.text, piece.start, piece.stop) for piece in tokenizer.pieces(" one two\n one ")] == [
        ("one", 1, 4),
        ("two", 5, 8),
        ("one", 10, 13),
    ]
    with pytest.raises(ServeError) as fault:
        tokenizer.decode([first])
    assert fault.value.kind is Kind.UNIMPLEMENTED


def test_a_model_without_a_tokenizer_says_so() -> None:
    with pytest.raises(NoTokenizer, match="model 'm' has no tokenizer"):
        load_tokenizer("", Path(), "m").encode("a")


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_a_file_that_is_none_is_the_models_fault(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ServeError, match=r"model 'm': tokenizer\.json cannot be read") as fault:
        FolderTokenizer(tmp_path / "tokenizer.json", "m")
    assert fault.value.kind is Kind.FAILED_PRECONDITION
    assert str(tmp_path) not in fault.value.message


def test_a_front_process_needs_no_numpy_for_it(tmp_path: Path) -> None:
    """Nor torch, nor transformers; and none of tokenizers or jinja2 before a model wants them."""
    save(tokenizers_of.byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    script = f"""
import asyncio, pathlib, sys
import fastserve.serving.text as text
from fastserve.serving.text.chat import ChatTemplate
from fastserve.serving.text.tokenizer import load_tokenizer
heavy = {{"numpy", "torch", "transformers"}}
assert not ({{*heavy, "tokenizers", "jinja2"}} & set(sys.modules)), sys.modules
folder = pathlib.Path({str(tmp_path)!r})
load_tokenizer("folder", folder, "m").encode("some text")
asyncio.run(ChatTemplate(folder, "m").render([], None, True, {{}}))
assert not heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
