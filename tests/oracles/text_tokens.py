"""_ext/text_tokens in plain Python."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from fastserve._ext.text_tokens import Placeholder, Token


class ByteText:
    """Bytes of tokens through Python's incremental decoder."""

    def __init__(self, table: dict[int, str | bytes], look: Callable[[int], str | bytes]) -> None:
        self._table, self._look = table, look
        self._utf8 = getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        value = self._table.setdefault(token, self._look(token))
        return self._utf8.decode(value.encode() if isinstance(value, str) else value)

    def end(self) -> str:
        found = self._utf8.decode(b"", True)
        self._utf8.reset()
        return found


def take_plain(
    records: list[tuple[int, int, int, bytes]],
    detokenizer: Any,
    specials: frozenset[int],
    none: Any,
    tokens: list[Token],
    ids: list[int],
    texts: list[str],
) -> int:
    for taken, (token, finish, us, extra) in enumerate(records):
        if finish or extra or token < 0:
            return taken
        made = Token(token, detokenizer.add(token), len(ids), us, token in specials, none)
        tokens.append(made)
        ids.append(made.id)
        texts.append(made.text)
    return len(records)


class Flow:
    """As the compiled one, but that it sends at once."""

    def __init__(
        self,
        detokenizer: Any,
        specials: frozenset[int],
        none: Any,
        ids: list[int],
        texts: list[str],
        frames: Any,
        reply: Any,
        failed: Callable[[Exception], object],
    ) -> None:
        self._lists = detokenizer, specials, none
        self._kept = ids, texts
        self._frames, self._reply, self._failed = frames, reply, failed
        self.open, self.taken_ns = False, 0

    def take(self, records: list[tuple[int, int, int, bytes]], now_ns: int) -> bool:
        plain = all(token >= 0 and not finish and not extra for token, finish, _, extra in records)
        if not (self.open and plain and self._reply.ready):
            return False
        self.taken_ns = now_ns
        tokens: list[Token] = []
        try:
            take_plain(records, *self._lists, tokens, *self._kept)
            if written := self._frames.write(tokens):
                self._reply.send(written)
        except Exception as fault:
            self.open = False
            self._failed(fault)
        return True


def pass_on(told: list[Any], reader: Any, gaps: list[int], now_ns: int) -> list[Any]:
    left = []
    for run, records in told:
        flows = run.flow is not None and run.begun and not run.ended and records is not None
        if not flows or not run.flow.take(records, now_ns):
            left.append((run, records))
            continue
        run.held += len(records)
        reader.taken(run.slot, len(records))
        gaps += [record[2] for record in records]
    return left


def write_event(form: Sequence[bytes | Placeholder], token: Token, *, strip: bool = False) -> bytes:
    """One token's event."""
    return b"".join(part if isinstance(part, bytes) else _fill(part, token, strip) for part in form)


def _fill(placeholder: Placeholder, token: Token, strip: bool) -> bytes:
    ms = f"{max(token.us, 0) // 1000}.{max(token.us, 0) % 1000:03d}"
    text = "".join(c for c in token.text if not strip or c >= " " or c in "\t\n\r")
    number = "null" if token.logprob is None or not isfinite(token.logprob) else repr(token.logprob)
    found = {
        Placeholder.ID: str(token.id),
        Placeholder.NUMBER: str(token.index + 1),
        Placeholder.TEXT: json.dumps(text, ensure_ascii=False),
        Placeholder.PREFILL: ms if token.first else "null",
        Placeholder.DECODE: "null" if token.first else ms,
        Placeholder.LOGPROB: number,
        Placeholder.SPECIAL: "true" if token.special else "false",
    }
    return found[placeholder].encode()
