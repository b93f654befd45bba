"""What makes tokens of text, for one model: tokenizer.json of its folder, one token a word, or nobody.

    tokenizer.encode("a b")  -> [17, 4]      tokenizer.decode([17, 4]) -> "a b"

The library `tokenizers` is imported where a model has a tokenizer.json, and not before: most front processes
serve no text. It is read and never written, and needs neither numpy nor transformers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from zlib import crc32

from fastserve.errors import Kind, ServeError
from fastserve.serving.text.ask import NoTokenizer
from fastserve.serving.text.detokenize import Detokenizer, Silent, bytes_of, detokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

FILE = "tokenizer.json"
WORDS = 1 << 20


class Piece(NamedTuple):
    """A token of a text, which is text[start:stop]; a special one that was added is nothing of it."""

    id: int
    text: str
    start: int
    stop: int


class Tokenizer(Protocol):
    """Text to tokens and back; threads may share it. `specials` are the ids of special tokens."""

    specials: frozenset[int]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; with `special`, those that the model wants before or after it too."""

    def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        """The same, with where each stands in the text."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; with `special`, that of special tokens too."""

    def token_text(self, token: int) -> str:
        """One token alone, special ones too."""

    def token_bytes(self, token: int) -> bytes:
        """What it adds to a text's bytes: a part of a character, maybe."""

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """For the tokens of one sequence, as they come."""


def load_tokenizer(kind: str, folder: Path, model: str) -> Tokenizer:
    """That of config.text.TextOptions.tokenizer. Raises ServeError when it cannot be read."""
    if kind == "folder":
        return FolderTokenizer(folder / FILE, model)
    return WordsTokenizer(model) if kind == "words" else Nobody(model)


class FolderTokenizer:
    """tokenizer.json, by the library."""

    def __init__(self, path: Path, model: str) -> None:
        self._library = _load(path, model)
        added = self._library.get_added_tokens_decoder()
        self.specials = frozenset(token for token, said in added.items() if said.special)
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

    def token_text(self, token: int) -> str:
        return self.decode([token], special=True)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes(token)

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        return self._make(frozenset() if special else self.specials)


class WordsTokenizer:
    """One token a word: for engines of users' own that count, and say the text of their tokens themselves.

    Ids are hashes of words, so that every process gives the same; text cannot be made of them."""

    specials: frozenset[int] = frozenset()

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

    def token_text(self, token: int) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        return Silent()


class Nobody:
    """The engine takes text, and gives text."""

    specials: frozenset[int] = frozenset()

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        raise NoTokenizer(self._model)

    def pieces(self, text: str, *, special: bool = True) -> list[Piece]:
        raise NoTokenizer(self._model)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        raise NoTokenizer(self._model)

    def token_text(self, token: int) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return b""

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        return Silent()


def _load(path: Path, model: str) -> Library:
    try:
        # One text at a time is encoded here: a pool of threads, which it would start, is of no use.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise ServeError(
            Kind.FAILED_PRECONDITION,
            f"model '{model}' has a {FILE}: reading it needs the package tokenizers (the extra 'llm')",
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
