"""Characters and stop strings whose bytes come one token each, in every API: pieces are whole characters, and
a stop string is found wherever tokens part it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastserve.codec.generation import Info
from fastserve.serving.text.tokenizer import _BYTE_OF
from fastserve.settings import TextgenOptions
from tests.conformance.text.apis import APIS, Api, Reply
from tests.dialects.text_common.serving import Local
from tests.serving.text.tokenizers_of import byte_level, save
from tests.text_rig import Scripted

TEXT = "naïve ☃ 🎉🏽 中EN 中END☃ after"
STOP = "中END☃"
OF_TEXTGEN = [api for api in APIS if api.dialect == "textgen"]
STOPPING = [api for api in OF_TEXTGEN if not api.name.startswith(("mindie", "responses"))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    tokenizer, folder = byte_level(), tmp_path_factory.mktemp("m1")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    of_byte = {byte: tokenizer.token_to_id(character) for character, byte in _BYTE_OF.items()}
    eos = tokenizer.token_to_id("</s>")
    script = [(of_byte[byte], None) for byte in TEXT.encode()] + [(eos, None)]
    info = Info(vocab_size=1000, slots=8, max_tokens=1000, max_prompt_tokens=500)
    engine = Scripted(script, eos={eos}, info=info)
    with Local({"m1": engine}, TextgenOptions(), folder=save(tokenizer, folder)) as local:
        yield local


def ask(server: Local, api: Api, **more: object) -> Reply:
    limit = "max_tokens" if api.name.startswith(("chat", "completion", "vllm")) else "max_new_tokens"
    if api.name.startswith("messages") and "stop" in more:
        more = {"stop_sequences": more["stop"]}
    found = server.post(api.path_of(), api.ask("hi|", **{limit: 200}, **more))
    return Reply(found.status, found.body)


@pytest.mark.parametrize("api", OF_TEXTGEN, ids=lambda api: api.name)
def test_pieces_are_whole_characters(server: Local, api: Api) -> None:
    reply = ask(server, api)
    assert api.read(reply).text == TEXT
    assert "�".encode() not in reply.body
    assert b"\\ufffd" not in reply.body


@pytest.mark.parametrize("api", STOPPING, ids=lambda api: api.name)
@pytest.mark.parametrize("stop", [STOP, "ND☃", "☃ after", "D\u2603"])
def test_a_stop_string_across_bytes(server: Local, api: Api, stop: str) -> None:
    """TGI's own text has it at its end."""
    end = TEXT.index(stop)
    wanted = TEXT[: end + len(stop)] if api.name.startswith("tgi") else TEXT[:end]
    said = api.read(ask(server, api, stop=[stop]))
    assert (said.text, said.error) == (wanted, "")


@pytest.mark.parametrize("api", STOPPING, ids=lambda api: api.name)
def test_the_beginning_of_a_stop_string_is_passed_on_when_it_was_none(server: Local, api: Api) -> None:
    said = api.read(ask(server, api, stop=["中ENX", "🎉🏿"]))
    assert said.text == TEXT
