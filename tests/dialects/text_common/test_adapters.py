"""Adapters of a model by the names that clients give: OpenAI's `model`, TGI's `adapter_id`, and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastserve.codec.generation import Info
from fastserve.dialects.textgen import Textgen
from fastserve.settings import TextgenOptions
from tests.dialects.text_common.rigs import HELLO
from tests.dialects.text_common.serving import Local
from tests.text_rig import Scripted, listening

ADAPTERS = ["shared", "support", "m2"]
INFO = Info(vocab_size=1 << 20, tokenizer="words", slots=8, adapters=ADAPTERS)
CHAT = [{"role": "user", "content": "hi"}]


def engines() -> dict[str, Scripted]:
    other = Info(vocab_size=1 << 20, tokenizer="words", slots=8, adapters=["shared"])
    return {"m1": Scripted(HELLO, eos={2}, info=INFO), "m2": Scripted(HELLO, eos={2}, info=other)}


class Keyed(Local):
    """A server whose clients have a key of some models."""

    patterns: tuple[str, ...] = ()

    async def _open(self) -> None:
        await super()._open()
        self.part = Textgen(self.engine.context.narrow(self.patterns), self.options)
        self.port = await self._stack.enter_async_context(listening(self.part))


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    with Local(engines(), TextgenOptions(default_model="m1")) as opened:
        yield opened


def keyed(*patterns: str) -> Keyed:
    made = Keyed(engines(), TextgenOptions(default_model="m1", any_model=False))
    made.patterns = patterns
    return made


def adapter_of(server: Local, model: str = "m1") -> str:
    """The adapter of the last request that a model got."""
    engine: Any = server.models[model]
    found: str = engine.seen[-1].note.adapter
    return found


def complete(server: Local, model: str, **more: Any) -> Any:
    return server.post("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 2, **more})


def test_openais_model_names_an_adapter(server: Local) -> None:
    assert complete(server, "support").json["model"] == "support"
    assert adapter_of(server) == "support"
    assert complete(server, "m1").json["model"] == "m1"
    assert adapter_of(server) == ""
    chat = server.post("/v1/chat/completions", {"model": "support", "messages": CHAT, "max_tokens": 2})
    assert (chat.json["model"], adapter_of(server)) == ("support", "support")
    pieces = complete(server, "support", stream=True)
    assert b'"model":"support"' in pieces.body
    assert (pieces.status, adapter_of(server)) == (200, "support")


def test_a_served_model_goes_before_an_adapter_of_its_name(server: Local) -> None:
    assert complete(server, "m2").status == 200
    assert adapter_of(server, "m2") == ""


def test_adapters_of_two_models_with_one_name_are_refused(server: Local) -> None:
    refused = complete(server, "shared")
    assert refused.status == 400
    assert refused.json["error"]["message"] == "the models m1 and m2 each have an adapter 'shared'"


def test_unknown_names_are_not_found(server: Local) -> None:
    refused = complete(server, "nobody")
    assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")


def test_adapters_are_listed_with_their_parents(server: Local) -> None:
    listed = server.ask("GET", "/v1/models").json["data"]
    found = {(one["id"], one["parent"], one["root"]) for one in listed}
    assert found == {("m1", None, "m1"), ("m2", None, "m2"), ("support", "m1", "m1")}
    one = server.ask("GET", "/v1/models/support").json
    assert (one["id"], one["parent"]) == ("support", "m1")
    assert server.ask("GET", "/v1/models/nobody").status == 404


def test_tgis_adapter_id(server: Local) -> None:
    for name in ("support", "m2", "shared"):
        body = {"inputs": "hi", "parameters": {"adapter_id": name, "max_new_tokens": 2}}
        assert server.post("/generate", body).status == 200
        assert adapter_of(server) == name
        assert server.post("/generate_stream", body).status == 200
    refused = server.post("/generate", {"inputs": "hi", "parameters": {"adapter_id": "nobody"}})
    assert refused.status == 404
    assert refused.json["error"] == "model 'm1' has no adapter 'nobody'"
    server.post("/generate", {"inputs": "hi"})
    assert adapter_of(server) == ""


def test_any_model_takes_adapters_by_their_names() -> None:
    with Local(engines(), TextgenOptions(default_model="m2", any_model=True)) as server:
        assert complete(server, "support").json["model"] == "support"
        assert complete(server, "nobody").json["model"] == "m2"


def test_a_key_needs_both_names() -> None:
    with keyed("m1", "support") as both:
        assert complete(both, "support").json["model"] == "support"
        assert {one["id"] for one in both.ask("GET", "/v1/models").json["data"]} == {"m1", "support"}
        refused = both.post("/generate", {"inputs": "hi", "parameters": {"adapter_id": "shared"}})
        assert refused.status == 403
    with keyed("m1") as model:
        assert complete(model, "support").status == 403
        assert {one["id"] for one in model.ask("GET", "/v1/models").json["data"]} == {"m1"}
        asked = {"inputs": "hi", "parameters": {"adapter_id": "support"}}
        assert model.post("/generate", asked).status == 403
        assert model.ask("GET", "/v1/models/support").status in (403, 404)
    with keyed("support") as adapter:
        assert complete(adapter, "support").status == 404
        assert adapter.ask("GET", "/v1/models").json["data"] == []
