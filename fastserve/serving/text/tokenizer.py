"""Tokenizers: text to tokens, and tokens to text as they come.

    tokenizer.encode("a b")  -> [17, 4]      tokenizer.decode([17, 4]) -> "a b"

    detokenizer.add(226)  -> ""         the first byte of three
    detokenizer.add(152)  -> ""
    detokenizer.add(131)  -> "☃"
    detokenizer.end()     -> ""         U+FFFD where tokens end within a character

    FolderTokenizer  tokenizer.json of the model's folder, read by the library `tokenizers`
    WordsTokenizer   one token a word, for engines that say the text of their tokens themselves
    NoTokens         none: the engine takes text

    ByteText         detokenizer of byte-level decoders (GPT-2, Llama 3, Qwen): a token is bytes, whatever its
                     neighbours are (compiled)
    WindowDecoder    detokenizer of all others: the last few tokens are decoded together, with and without the
                     new one, since a token's text depends on those before it

A detokenizer returns whole characters, which add up to the whole text. DecodeStream of the library
raises on bytes that are no UTF-8, which models do write. The library is imported where a model
has a tokenizer.json: most front processes serve no text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

import msgspec

from fastserve._ext.text_tokens import ByteText
from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BROKEN = "�"
MOST_HELD = 8
"""Tokens without a whole character, after which what there is passes as it is: no character is that long."""


MOST_CHARACTERS = 4 << 20
"""Characters of a prompt at most (spec mindie 1: 4 MB)."""


class NoTokenizer(ServeError):
    """A model whose engine takes text: its tokens are not known here."""

    def __init__(self, model: str) -> None:
        super().__init__(Kind.UNIMPLEMENTED, f"model '{model}' has no tokenizer")


class Detokenizer(Protocol):
    """Makes text of the tokens of one sequence."""

    def add(self, token: int) -> str:
        """Return the text that this token completes."""

    def end(self) -> str:
        """Return the rest: no more tokens come."""


class NoText:
    """Detokenizer of tokens whose text is not known here."""

    def add(self, token: int) -> str:
        return ""

    def end(self) -> str:
        return ""


class WindowDecoder:
    """Detokenizer of any decoder: `_ids[:_read]` were returned before and are context for the others."""

    __slots__ = ("_before", "_ids", "_library", "_read", "_skip")

    def __init__(self, library: Library, skip: frozenset[int]) -> None:
        self._library, self._skip = library, skip
        self._ids: list[int] = []
        self._read = 0
        self._before = ""

    def add(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if len(self._ids) - self._read < MOST_HELD and (
            text.endswith(BROKEN) or len(text) <= len(self._before)
        ):
            return ""
        return self._pass_on(text)

    def end(self) -> str:
        return self._pass_on(self._decode(self._ids)) if self._read < len(self._ids) else ""

    def _pass_on(self, text: str) -> str:
        new = text[len(self._before) :]
        del self._ids[: self._read]  # new tokens are context for the next ones
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        text: str = self._library.decode(ids, skip_special_tokens=False)
        return text


def detokenizer_of(library: Library) -> Callable[[frozenset[int]], Detokenizer]:
    """Return the factory of a tokenizer's detokenizers, by the tokens to skip."""
    if _is_byte_level(library):
        return _ByteLevel(library).detokenizer
    return lambda skip: WindowDecoder(library, skip)


class _ByteLevel:
    """The tables of one tokenizer, by what is skipped: with special tokens, without, and with those that
    begin calls of tools."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tables: dict[frozenset[int], dict[int, str | bytes]] = {}

    def detokenizer(self, skip: frozenset[int]) -> Detokenizer:
        table = self._tables.get(skip)
        if table is None:
            table = self._tables[skip] = dict.fromkeys(skip, "")
        return ByteText(table, self._look)

    def _look(self, token: int) -> str | bytes:
        data = _bytes_of(self._library.id_to_token(token))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


def bytes_of(library: Library) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes, which may be no whole characters."""
    if _is_byte_level(library):
        return lambda token: _bytes_of(library.id_to_token(token))

    def look(token: int) -> bytes:
        fallback = _FALLBACK.fullmatch(
            library.id_to_token(token) or ""
        )  # how these vocabularies spell a byte
        if fallback:
            return bytes.fromhex(fallback[1])
        text: str = library.decode([token], skip_special_tokens=False)
        return text.encode()

    return look


class _Decoder(msgspec.Struct):
    type: str = ""


def _is_byte_level(library: Library) -> bool:
    decoder = library.decoder
    return (
        decoder is not None and msgspec.json.decode(decoder.__getstate__(), type=_Decoder).type == "ByteLevel"
    )


def _alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies (GPT-2's): printing ones stand
    for themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(plain))
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def _bytes_of(token: str | None) -> bytes:
    """Return the bytes of a token of the byte alphabet; of any other, an added one, its text in UTF-8."""
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


FILE = "tokenizer.json"
WORDS = 1 << 20
LEAST_LONGEST = 16


class Piece(msgspec.Struct, gc=False, frozen=True):
    """A token of a text, which is text[start:stop]; a special one that was added is nothing of it."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer(Protocol):
    """Text to tokens and back; threads may share it. `specials` are the ids of special tokens."""

    specials: frozenset[int]
    longest: int
    """Characters of the longest token, at least LEAST_LONGEST: tokens may stand for characters that are left
    out."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text; with `special`, with the special tokens that the model wants around
        it."""

    def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        """Return the tokens of a text with their places in it."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; with `special`, that of special tokens too."""

    def token_id(self, text: str) -> int | None:
        """Return the token that is spelled so in the vocabulary; None where there is none."""

    def token_text(self, token: int) -> str:
        """Return the text of one token, special ones too."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, perhaps a part of a character."""

    def added_token(self, text: str) -> int | None:
        """Return the token that the vocabulary has for a text as a whole, such as `<tool_call>`."""

    def detokenizer(self, *, special: bool = False, shown: Sequence[str] = ()) -> Detokenizer:
        """Return a detokenizer for one sequence, of which special tokens are left out unless `special`.
        Those named by `shown` are text all the same."""


def load_tokenizer(kind: str, folder: Path, model: str) -> Tokenizer:
    """Return the tokenizer of TextOptions.tokenizer. Raises ServeError when it cannot be read."""
    if kind == "folder":
        return FolderTokenizer(folder / FILE, model)
    return WordsTokenizer(model) if kind == "words" else NoTokens(model)


class FolderTokenizer:
    """tokenizer.json, by the library."""

    def __init__(self, path: Path, model: str) -> None:
        self._library = _load(path, model)
        added = self._library.get_added_tokens_decoder()
        self._added = {said.content: token for token, said in added.items()}
        self.specials = frozenset(token for token, said in added.items() if said.special)
        self.longest = max(LEAST_LONGEST, *map(len, self._library.get_vocab(with_added_tokens=True)), 0)
        self._make, self._bytes = detokenizer_of(self._library), bytes_of(self._library)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        # The "fast" call computes no offsets, and holds the interpreter 20 times shorter after a large text.
        found: list[int] = self._library.encode_batch_fast([_clean(text)], add_special_tokens=special)[0].ids
        return found

    def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        text = _clean(text)
        found = self._library.encode(text, add_special_tokens=special)
        return [
            Piece(token, text[start:stop], start, stop)
            for token, (start, stop) in zip(found.ids, found.offsets, strict=True)
        ]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        found: str = self._library.decode(list(ids), skip_special_tokens=not special)
        return found

    def token_id(self, text: str) -> int | None:
        found: int | None = self._library.token_to_id(text)
        return found

    def token_text(self, token: int) -> str:
        return self.decode([token], special=True)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes(token)

    def added_token(self, text: str) -> int | None:
        return self._added.get(text)

    def detokenizer(self, *, special: bool = False, shown: Sequence[str] = ()) -> Detokenizer:
        skipped = frozenset() if special else self.specials
        return self._make(skipped.difference([self._added.get(text) for text in shown]) if shown else skipped)


class WordsTokenizer:
    """One token a word, for engines of users' own that say the text of their tokens themselves.

    Ids are hashes of words, so that every process gives the same; text cannot be made of them."""

    specials: frozenset[int] = frozenset()
    longest = MOST_CHARACTERS

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [_word_id(word) for word in text.split()]

    def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        found, stop = [], 0
        for word in text.split():
            start = text.index(word, stop)
            stop = start + len(word)
            found.append(Piece(_word_id(word), word, start, stop))
        return found

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        raise ServeError(Kind.UNIMPLEMENTED, f"model '{self._model}' cannot make text of tokens")

    def token_id(self, text: str) -> int | None:
        return None

    def token_text(self, token: int) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def added_token(self, text: str) -> int | None:
        return None

    def detokenizer(self, *, special: bool = False, shown: Sequence[str] = ()) -> Detokenizer:
        return NoText()


class NoTokens(WordsTokenizer):
    """No tokenizer: the engine takes and gives text."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        raise NoTokenizer(self._model)

    def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        raise NoTokenizer(self._model)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        raise NoTokenizer(self._model)


def _load(path: Path, model: str) -> Library:
    try:
        # One text at a time is encoded here: a pool of threads, which it would start, is of no use.
        # Not in os.environ, which workers inherit: later ones would get another environment.
        if "TOKENIZERS_PARALLELISM" not in os.environ:
            os.putenv("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise ServeError(
            Kind.FAILED_PRECONDITION,
            f"model '{model}' has a {FILE}: reading it needs the package tokenizers",
        ) from None
    try:
        library = Library.from_file(str(path))
    except Exception as fault:  # the library raises Exception itself
        raise ServeError(
            Kind.FAILED_PRECONDITION, f"model '{model}': {FILE} cannot be read: {fault}"
        ) from None
    library.no_padding()
    library.no_truncation()  # what is too long is refused, or cut where a request asks for it
    return library


def _clean(text: str) -> str:
    """Halves of surrogate pairs, which JSON can write and UTF-8 cannot, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _word_id(word: str) -> int:
    return crc32(word.encode("utf-8", "surrogatepass")) % WORDS
