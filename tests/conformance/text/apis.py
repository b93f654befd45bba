"""The APIs: how each is asked for the answer to a prompt, and what its replies say.

    api.ask("plain")  ->  body of the call;      api.read(reply)  ->  Said(status, text, error)

To add one, add a row to `APIS`: every scenario here then runs for it, over each transport.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "m1"
TYPE = re.compile(rb"^event: [a-z_.]+\n")
"""Before the data of an event, in the APIs that tell its type."""
TEXT, VECTOR = "one two three ", (1.0, 2.0, 3.0)
"""The answer of the models of these tests."""
FULL, LOST, LATE, UNKNOWN, INTERNAL = "full", "lost", "late", "unknown", "internal"
WORDS = {
    FULL: "the queue of this model is full",
    LOST: "the worker process died while it ran this request",
    LATE: "time",
    UNKNOWN: MODEL,
    INTERNAL: "nternal error",
}


@dataclass(frozen=True)
class Reply:
    """A reply as it came, perhaps not to its end."""

    status: int
    body: bytes
    whole: bool = True


@dataclass(frozen=True)
class Said:
    """The content of one reply. `error` is "" for none."""

    status: int
    text: str
    error: str = ""


@dataclass(frozen=True)
class Api:
    """One of them, whole or as a stream."""

    name: str
    path: str
    body: Callable[[str], dict[str, Any]]
    text: Callable[[Any], str]
    """Of one object of a reply."""
    dialect: str = "textgen"
    stream: bool = False
    nul: bool = False
    """Objects are told apart by a NUL, not as events."""
    last_is_whole: bool = False
    """The last object has the whole text."""
    early: bool = False
    """A stream's status is sent before its first token."""
    is_chat: bool = False
    """Another form of the chat API, over the same call."""
    timed: bool = True
    """A body may name a timeout."""
    statuses: dict[str, int] = field(default_factory=dict)
    finish: str = "eos"
    """How a sequence that is answered has ended, as it is counted."""

    def ask(self, prompt: str, **more: Any) -> bytes:
        """The body that asks for it."""
        body = self.body(prompt)
        if "parameters" in body:
            body["parameters"] |= more
        else:
            body |= more
        return json.dumps(body).encode()

    def path_of(self, model: str = MODEL) -> str:
        return self.path.replace("MODEL", model)

    def read(self, reply: Reply) -> Said:
        """Read one event. Half an object at its end is none."""
        objects = self._objects(reply)
        error = _error_of(objects[-1]) if objects else "there is nothing in the reply"
        good = objects[: len(objects) - bool(error)]
        texts = [self.text(one) for one in good]
        if self.last_is_whole and self.stream and good and not error:
            return Said(reply.status, texts[-1])
        return Said(reply.status, "".join(texts), error)

    def is_told(self, reply: Reply, event: str, *, begun: bool = False) -> bool:
        """Whether it tells of this event as this API does: by its status, or in a stream that has begun."""
        said = self.read(reply)
        in_stream = self.stream and (begun or (self.early and event in (LOST, LATE)))
        status = 200 if in_stream else self.statuses[event]
        return said.status == status and WORDS[event] in said.error and reply.whole

    def _objects(self, reply: Reply) -> list[Any]:
        if not self.stream or reply.status != 200:
            return [_decode(reply.body)]
        if self.nul:
            return [_decode(part) for part in reply.body.split(b"\0")[:-1]]
        events = [TYPE.sub(b"", part) for part in reply.body.split(b"\n\n")[:-1]]
        found = [part[5:].strip() for part in events if part.startswith(b"data:")]
        return [_decode(part) for part in found if part != b"[DONE]"]


def _decode(data: bytes) -> Any:
    try:
        found = json.loads(data)
    except ValueError:
        return {"error": f"no JSON: {data!r}"}
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def _error_of(told: Any) -> str:
    error = (told.get("error") or "") if isinstance(told, dict) else ""
    return str(error.get("message", "?") if isinstance(error, dict) else error)


def _events_text(key: str) -> Callable[[Any], str]:
    """Of events with a token each, the last of which has the whole instead."""

    def read(told: Any) -> str:
        if told.get(key) is not None:
            return str(told[key])
        return str((told.get("token") or {}).get("text") or "")

    return read


def _choice(key: str) -> Callable[[Any], str]:
    def read(told: Any) -> str:
        found = "".join(
            str((one.get("delta") or one.get("message") or {}).get("content") or "")
            if key == "chat"
            else one["text"]
            for one in told["choices"]
        )
        return found

    return read


MINDIE = {FULL: 503, LOST: 503, LATE: 500, UNKNOWN: 404, INTERNAL: 500}
OPENAI = {FULL: 503, LOST: 503, LATE: 504, UNKNOWN: 404, INTERNAL: 500}
TGI = {FULL: 429, LOST: 503, LATE: 500, UNKNOWN: 404, INTERNAL: 424}
V2 = {FULL: 503, LOST: 503, LATE: 504, UNKNOWN: 404, INTERNAL: 500}


def _pair(name: str, whole: dict[str, Any], stream: dict[str, Any], **both: Any) -> tuple[Api, Api]:
    return Api(name, **both, **whole), Api(f"{name}-stream", stream=True, **both, **stream)


def _mindie(*, stream: bool) -> Callable[[str], dict[str, Any]]:
    return lambda prompt: {"inputs": prompt, "stream": stream, "parameters": {}}


def _tgi(prompt: str) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {}}


def _openai(key: str, *, stream: bool) -> Callable[[str], dict[str, Any]]:
    def write(prompt: str) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if key == "chat" else {"prompt": prompt}
        return {"model": MODEL, "stream": stream, "temperature": 0, **asked}

    return write


def _responses(*, stream: bool) -> Callable[[str], dict[str, Any]]:
    return lambda prompt: {"model": MODEL, "stream": stream, "temperature": 0, "input": prompt}


def _response_text(told: Any) -> str:
    if "output" in told:
        return str(told["output"][0]["content"][0]["text"])
    return str(told["delta"]) if told["type"] == "response.output_text.delta" else ""


def _messages(*, stream: bool) -> Callable[[str], dict[str, Any]]:
    def write(prompt: str) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1 << 20}
        return {"model": MODEL, "stream": stream, "temperature": 0, **asked}

    return write


def _message_text(told: Any) -> str:
    if told["type"] == "message":
        return str(told["content"][0]["text"])
    return str(told["delta"]["text"]) if told["type"] == "content_block_delta" else ""


def _vllm(*, stream: bool) -> Callable[[str], dict[str, Any]]:
    return lambda prompt: {"prompt": prompt, "stream": stream}


def _vllm_text(told: Any) -> str:
    """Whole, it begins with the prompt."""
    text = str(told["text"][0])
    return text[text.index("|") + 1 :] if "|" in text else text


def _v2(*, stream: bool) -> Callable[[str], dict[str, Any]]:
    return lambda prompt: {"text_input": prompt, "stream": stream, "exclude_input_in_output": True}


def _triton(prompt: str) -> dict[str, Any]:
    return {"text_input": prompt, "parameters": {}}


def _output(told: Any) -> str:
    return str(told["text_output"])


def _embedding(told: Any) -> str:
    """A vector is as good as a text here."""
    (one,) = told["data"]
    return TEXT if one["embedding"] == list(VECTOR) else ""


EMBEDDINGS = Api(
    "embeddings",
    "/v1/embeddings",
    lambda prompt: {"model": MODEL, "input": prompt},
    _embedding,
    statuses=OPENAI,
    finish="stop",
)
"""Of models that make vectors, which a server of texts alone has not."""
APIS: tuple[Api, ...] = (
    *_pair(
        "mindie",
        {"body": _mindie(stream=False)},
        {"body": _mindie(stream=True), "last_is_whole": True, "early": True},
        path="/infer",
        text=_events_text("generated_text"),
        statuses=MINDIE,
    ),
    *_pair(
        "mindie-triton",
        {"path": "/v2/models/MODEL/generate"},
        {"path": "/v2/models/MODEL/generate_stream", "early": True},
        body=_triton,
        text=_output,
        statuses=MINDIE,
    ),
    *_pair(
        "tgi",
        {"path": "/generate"},
        {"path": "/generate_stream", "last_is_whole": True},
        body=_tgi,
        text=_events_text("generated_text"),
        statuses=TGI,
    ),
    *_pair(
        "chat",
        {"body": _openai("chat", stream=False)},
        {"body": _openai("chat", stream=True)},
        path="/v1/chat/completions",
        text=_choice("chat"),
        statuses=OPENAI,
    ),
    *_pair(
        "completion",
        {"body": _openai("text", stream=False)},
        {"body": _openai("text", stream=True)},
        path="/v1/completions",
        text=_choice("text"),
        statuses=OPENAI,
    ),
    *_pair(
        "responses",
        {"body": _responses(stream=False)},
        {"body": _responses(stream=True)},
        path="/v1/responses",
        text=_response_text,
        is_chat=True,
        statuses=OPENAI,
    ),
    *_pair(
        "messages",
        {"body": _messages(stream=False)},
        {"body": _messages(stream=True)},
        path="/v1/messages",
        text=_message_text,
        is_chat=True,
        timed=False,
        statuses=OPENAI,
    ),
    *_pair(
        "vllm",
        {"body": _vllm(stream=False)},
        {"body": _vllm(stream=True), "nul": True},
        path="/generate",
        text=_vllm_text,
        statuses=MINDIE,
    ),
    *_pair(
        "v2",
        {"path": "/v2/models/MODEL/generate", "body": _v2(stream=False)},
        {"path": "/v2/models/MODEL/generate_stream", "body": _v2(stream=True)},
        text=_output,
        dialect="kserve_v2",
        timed=False,
        statuses=V2,
    ),
)
