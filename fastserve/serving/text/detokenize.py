"""Text out of tokens, as they come: what is passed on is whole characters, and adds up to the whole text.

    detokenizer.add(226)  -> ""         the first byte of three
    detokenizer.add(152)  -> ""
    detokenizer.add(131)  -> "☃"
    detokenizer.end()     -> ""         U+FFFD where tokens end within a character

    ByteText byte-level decoders (GPT-2, Llama 3, Qwen): a token is bytes, whatever stands beside it
             (compiled)
    Window   any other: the last few tokens are decoded together, with and without the new one, since a
             token's text depends on those before it (a leading space that falls away, a byte of a character)

The library has such a thing too (DecodeStream). It raises on sequences of bytes that are no UTF-8, which
models do write, and drops them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from fastserve._ext.text_tokens import ByteText

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BROKEN = "�"
MOST_HELD = 8
"""Tokens without a whole character, after which what there is passes as it is: no character is that long."""


class Detokenizer(Protocol):
    """That of one sequence."""

    def add(self, token: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """What is left: no more tokens come."""


class Silent:
    """Of tokens whose text nobody here knows."""

    def add(self, token: int) -> str:
        return ""

    def end(self) -> str:
        return ""


class Window:
    """Any decoder: `_ids[:_read]` have been passed on, from `_start` on they are context for what follows."""

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
        del self._ids[: self._read]  # what was new is the context of what follows
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        text: str = self._library.decode(ids, skip_special_tokens=False)
        return text


def detokenizer_of(library: Library) -> Callable[[frozenset[int]], Detokenizer]:
    """What makes the detokenizers of a tokenizer, given the tokens that are no text."""
    if _is_byte_level(library):
        return _ByteLevel(library).detokenizer
    return lambda skip: Window(library, skip)


class _ByteLevel:
    """The tables of one tokenizer, by what is skipped: there are two, with special tokens and without."""

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
    """What tells a token's bytes, special ones' too: they may be no whole characters."""
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
    """The characters that stand for bytes in byte-level vocabularies (GPT-2's): those that print stand for
    themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(plain))
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def _bytes_of(token: str | None) -> bytes:
    """A token none of whose characters stands for anything else is bytes; any other, an added one, itself."""
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
