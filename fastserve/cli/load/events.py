"""A connection of the load generator whose answers are streams of OpenAI's API: when their texts came.

It has the face of `generator.Connection`. An answer counts when it is whole: it has text, a reason for its
end, its usage and [DONE]. What one event brings is one piece; a server may put several tokens into one.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import msgspec

from fastserve.cli.load.counters import Counters
from fastserve.cli.load.generator import Connection

END = b"\n\n"


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    text: str = ""
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    completion_tokens: int


class Event(msgspec.Struct):
    """One event, as far as it is looked at."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_read = msgspec.json.Decoder(Event).decode


class EventsConnection(Connection):
    """Asks again as soon as the stream before is over."""

    def __init__(self, requests: cycle[bytes], counters: Counters) -> None:
        super().__init__(requests, counters)
        self._begin()

    def _begin(self) -> None:
        self._left = b""
        self._last_ns = self._pieces = self._tokens = 0
        self._reason = self._fault = ""
        self._done = False

    def ask(self) -> None:
        self._begin()
        super().ask()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        *events, self._left = (self._left + body).split(END)
        for event in events:
            self._take(event.removeprefix(b"data:").strip())

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = _read(data)
        except msgspec.DecodeError:
            self._fault = "an event that cannot be read"
            return
        if event.error is not None:
            self._fault = "an error within a stream"
        if event.usage is not None:
            self._tokens = event.usage.completion_tokens
        for choice in event.choices:
            self._reason = choice.finish_reason or self._reason
            if choice.text or (choice.delta is not None and choice.delta.content):
                self._piece()

    def _piece(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._last_ns:
            self.counters.texts.gap(now_ns - self._last_ns)
        else:
            self.counters.texts.first(now_ns - self.sent_ns)
        self._last_ns = now_ns
        self._pieces += 1

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() == 200:
            whole = self._done and self._reason and self._tokens and self._pieces
            fault = self._fault or ("" if whole else "an answer that is not whole")
            if fault:
                self.give_up(fault)
                return
            self.counters.texts.whole(self._tokens, self._pieces)
        super().on_message_complete()
