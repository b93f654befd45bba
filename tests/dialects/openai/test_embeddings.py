"""POST /v1/embeddings over a whole server with workers: a class of a user's own, an encoder's folder with its
tokenizer, a decoder with and without pooling. The openai package, unmodified, and plain bodies."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import hypot
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from fastserve.dialects.text_common.event_streams import RequestTimeout
from fastserve.engine.engine import scheduler_of
from fastserve.settings import TextgenOptions
from tests.backends.llm.folders import save_model
from tests.backends.llm.test_vectors import expected, save_encoder
from tests.dialects.text_common.serving import Hosted
from tests.late import Late

openai = Late("openai")
WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{at}": at for at in range(4, 90)}
COUNTS = """
import time

class Model:
    info = {"embeds": 3, "max_prompt_tokens": 6, "max_tokens": 7, "slots": 4}

    def __init__(self, config):
        pass

    def embed(self, requests):
        for request in requests:
            if request.text or len(request.ids) == 5:
                time.sleep(3 if 7 in request.ids else 0.5)
        return [[len(request.ids), request.priority, 0.1] for request in requests]
"""
BOTH = """
class Model:
    info = {"embeds": 1, "vocab_size": 1000}

    def __init__(self, config):
        pass

    def generate(self, request):
        for at in range(3):
            yield at, "x"

    def embed(self, requests):
        return [[float(len(request.text))] for request in requests]
"""


def write_python(folder: Path, name: str, source: str, config: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(source)
    (folder / name / "model.yaml").write_text(f"backend: text_python\n{config}")


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any, models: dict[str, Any]) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("models")
    write_python(folder, "counts", COUNTS, "text: {tokenizer: words, normalize: false}")
    write_python(folder, "narrow", BOTH, "text: {tokenizer: '', max_sequences: 1, max_waiting: 0}")
    write_python(folder, "both", BOTH, 'text: {tokenizer: "", normalize: false}')
    for name in ("encoder", "decoder", "writer"):
        (folder / name / "1").mkdir(parents=True)
        where = folder / name / "1"
        models[name] = save_encoder(where, "bert") if name == "encoder" else save_model(where, "llama")
        write_tokenizer(where)
    (folder / "decoder" / "model.yaml").write_text("backend: text\ntext: {pooling: last, max_sequences: 4}\n")
    with Hosted(folder, TextgenOptions(default_model="writer")) as hosted:
        yield hosted


@pytest.fixture
def client(server: Hosted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_an_encoder(client: openai.OpenAI, models: dict[str, Any]) -> None:
    """The client asks for base64 by itself."""
    made = client.embeddings.create(model="encoder", input=["w10 w11", "w12", "what"])
    assert (made.object, made.model, made.usage.prompt_tokens, made.usage.total_tokens) == (
        "list",
        "encoder",
        10,
        10,
    )
    assert [(each.object, each.index) for each in made.data] == [("embedding", at) for at in range(3)]
    for each, ids in zip(made.data, ([1, 10, 11, 2], [1, 12, 2], [1, 3, 2]), strict=True):
        assert each.embedding == pytest.approx(list(expected(models["encoder"], ids, "mean")), abs=1e-5)


def test_a_decoder_that_writes_too(client: openai.OpenAI, models: dict[str, Any]) -> None:
    (one,) = client.embeddings.create(model="decoder", input="w10 w11", encoding_format="float").data
    wanted = expected(models["decoder"].base_model, [1, 10, 11, 2], "last")
    assert one.embedding == pytest.approx(list(wanted), abs=1e-5)
    assert client.completions.create(model="decoder", prompt="w10", max_tokens=3).usage.completion_tokens > 0


def test_every_form_of_input(client: openai.OpenAI) -> None:
    def lengths(given: Any) -> list[float]:
        found = client.embeddings.create(model="counts", input=given, encoding_format="float")
        assert found.usage.prompt_tokens == sum(each.embedding[0] for each in found.data)
        return [each.embedding[0] for each in found.data]

    assert lengths("a b c") == [3]
    assert lengths(["a", "a b"]) == [1, 2]
    assert lengths([7, 8, 9, 10]) == [4]
    assert lengths([[7], [7, 8, 9]]) == [1, 3]
    assert lengths(["a", [7, 8]]) == [1, 2]


def test_the_bytes_of_a_reply(server: Hosted) -> None:
    """float32 in as few digits as say them."""
    reply = server.post("/v1/embeddings", {"model": "counts", "input": "a", "priority": 2})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1.0, 2.0, 0.1]}],'
        b'"model":"counts","usage":{"prompt_tokens":1,"total_tokens":1}}'
    )
    packed = server.post("/v1/embeddings", {"model": "counts", "input": "a", "encoding_format": "base64"})
    vector = packed.json["data"][0]["embedding"]
    assert array("f", base64.b64decode(vector)) == array("f", [1, 5, 0.1])


def test_dimensions(client: openai.OpenAI, models: dict[str, Any]) -> None:
    whole = client.embeddings.create(model="encoder", input="w10").data[0].embedding
    first = client.embeddings.create(model="encoder", input="w10", dimensions=8).data[0].embedding
    length = hypot(*whole[:8])
    assert first == pytest.approx([each / length for each in whole[:8]], abs=1e-6)
    plain = client.embeddings.create(model="counts", input="a b", dimensions=2, encoding_format="float")
    assert plain.data[0].embedding == [2, 5]
    with pytest.raises(openai.BadRequestError, match="must be at most 3, got 4") as wide:
        client.embeddings.create(model="counts", input="a", dimensions=4)
    assert wide.value.param == "dimensions"


def test_texts_of_an_engine_without_tokenizer(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="both", input=["héé", "a"], encoding_format="float")
    assert [each.embedding for each in made.data] == [[3], [1]]
    assert client.completions.create(model="both", prompt="a").choices[0].text == "xxx"


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"input": []}, "input", "must not be empty"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input[1]", "must not be empty"),
        ({"input": [[1], []]}, "input[1]", "must not be empty"),
        ({"input": ["a"] * 2049}, "input", "2049 items, allowed: at most 2048"),
        ({"input": [1.5]}, "input[0]", "string or a list of tokens"),
        ({"input": [[-1]]}, "input[0][0]", "must be a token"),
        ({"input": [None]}, "input[0]", "string or a list of tokens"),
        ({"input": {"a": 1}}, "input", ""),
        ({}, "input", "required"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
        ({"input": "a", "dimensions": 0}, "dimensions", ""),
        ({"input": ["a", "a b c d e f g"]}, "input[1]", "7 tokens, allowed: 1 to 6"),
        ({"input": "a", "priority": 6}, "priority", ""),
        ({"input": [[5], [5, 9000]], "model": "encoder"}, "input[1]", "token 1 of the prompt is 9000, "),
        ({"input": ["a", "a" * ((4 << 20) + 1)]}, "input[1]", "characters, allowed: 1 to 4194304"),
    ],
)
def test_bad_input(server: Hosted, given: Any, param: str, words: str) -> None:
    reply = server.post("/v1/embeddings", {"model": "counts", **given})
    assert reply.status == 400, reply
    error = reply.json["error"]
    assert error["param"] == param
    assert words in error["message"]
    is_long = "tokens, allowed" in words or "characters, allowed" in words
    assert error["code"] == ("context_length_exceeded" if is_long else None)


def test_whose_it_is_not(client: openai.OpenAI, server: Hosted) -> None:
    with pytest.raises(openai.BadRequestError, match="model 'writer' makes no embeddings") as none:
        client.embeddings.create(model="writer", input="a")
    assert none.value.code == "not_supported"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="a")
    with pytest.raises(openai.BadRequestError, match="writes none") as mute:
        client.completions.create(model="encoder", prompt="a")
    assert mute.value.code == "not_supported"
    assert server.post("/v2/models/encoder/generate", {"text_input": "a"}).status == 501
    assert server.ask("GET", "/health/timed-20").json == {"status": "healthy"}
    assert {each.id for each in client.models.list()} == {
        "both",
        "counts",
        "decoder",
        "encoder",
        "narrow",
        "writer",
    }


def test_many_at_once(client: openai.OpenAI, models: dict[str, Any]) -> None:
    """Requests of many texts from many clients, mixed in batches: each has its own, in its order."""
    cases = [[f"w{10 + (at * 7 + one) % 60}" for one in range(at * 9 + 1)] for at in range(16)]
    known: dict[str, Any] = {}
    with torch.inference_mode():
        for word in {word for case in cases for word in case}:
            known[word] = expected(models["encoder"], [1, WORDS[word], 2], "mean")
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda case: client.embeddings.create(model="encoder", input=case), cases))
    for case, reply in zip(cases, replies, strict=True):
        assert len(reply.data) == len(case)
        for word, each in zip(case, reply.data, strict=True):
            assert each.embedding == pytest.approx(list(known[word]), abs=1e-5)


def test_more_texts_than_may_wait(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="narrow", input=["a"] * 200, encoding_format="float")
    assert len(made.data) == 200


def test_a_client_that_leaves_and_one_whose_time_is_up(server: Hosted) -> None:
    """300 texts, of which each takes half a second: who leaves takes them along."""
    slow = [[1, 2, 3, 4, 5]] * 300
    body = json.dumps({"model": "counts", "input": slow}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as leaver:
        leaver.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        _until_waiting(server)
    begun = time.monotonic()
    reply = server.post("/v1/embeddings", {"model": "counts", "input": slow, "timeout": 1})
    assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
    assert time.monotonic() - begun < 100
    server.settle()


def test_a_text_that_runs_when_its_time_is_up(server: Hosted) -> None:
    """It takes three seconds, and is not waited for."""
    asked = {"model": "counts", "input": [7, 1, 2, 3, 4], "timeout": 1}
    reply = server.post("/v1/embeddings", asked)
    assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
    assert "client timeout" in reply.json["error"]["message"]


def test_the_engine_may_notice_first(server: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops what waits, and the client is told of its own time all the same."""
    monkeypatch.setattr(RequestTimeout, "__enter__", lambda timeout: timeout)
    monkeypatch.setattr(RequestTimeout, "__exit__", lambda *_: None)
    reply = server.post("/v1/embeddings", {"model": "counts", "input": [[1, 2, 3, 4, 5]] * 40, "timeout": 1})
    assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
    assert "client timeout" in reply.json["error"]["message"]


def _until_waiting(server: Hosted) -> None:
    until = time.monotonic() + 60
    while not _waiting(server):
        assert time.monotonic() < until
        time.sleep(0.01)


def _waiting(server: Hosted) -> int:
    async def read() -> int:
        await asyncio.sleep(0)
        return sum(
            scheduler_of(version).queue.ring.outstanding()  # type: ignore[attr-defined]
            for model in ("counts",)
            if (version := server.server.catalog.available(model)) is not None
        )

    return int(server.run(read()))
