"""`fastserve bench --protocol text`: what of a stream is counted, and whole runs against a scripted model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvloop
from click.testing import CliRunner

from fastserve.cli import main
from fastserve.cli.bench import PROTOCOLS, LoadOptions, as_json, report
from fastserve.cli.client import ServerClient
from fastserve.cli.load import BrokenLoadError, ClosedLoop, EventsLoadClient, LoadPlan, LoadResult
from tests.cli.text_server import serving

uvloop.run(asyncio.sleep(0))  # libuv opens its pipe with the process's first loop, for good

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE, TWO = {"choices": [{"text": "a"}]}, {"choices": [{"delta": {"content": "b"}}]}
END = {"choices": [{"text": "", "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 6}}
WHOLE = [ONE, TWO, TWO, END, USAGE, "[DONE]"]


class Replies(asyncio.Transport):
    """A transport that answers each request with the same bytes, in pieces of `size`."""

    def __init__(self, client: EventsLoadClient, reply: bytes, size: int) -> None:
        super().__init__()
        self._client, self._reply, self._size = client, reply, size

    def write(self, data: Any) -> None:
        for start in range(0, len(self._reply), self._size):
            self._client.data_received(self._reply[start : start + self._size])


def events_of(given: list[Any]) -> bytes:
    lines = (one if isinstance(one, str) else json.dumps(one) for one in given)
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def answer(body: bytes, size: int = 1 << 20) -> LoadResult:
    """Return the counts of one reply, whose body comes in chunks of `size` bytes."""
    plan = LoadPlan("h", 1, 1, 0, 1, 5.0, [b"ask"], events=True)

    async def work() -> LoadResult:
        load = ClosedLoop(plan)
        load.counting = True
        client = EventsLoadClient(plan, load)
        chunks = (body[start : start + size] for start in range(0, len(body), size))
        reply = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"
        client.connection_made(Replies(client, reply, size))
        try:
            await client.ask(b"ask")
        except BrokenLoadError as fault:
            load.result.faults[str(fault)] += 1
        return load.result

    return asyncio.run(work())


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_whole_answer_is_counted_however_it_comes(size: int) -> None:
    found = answer(events_of(WHOLE), size)
    assert (found.pieces, found.answers, found.tokens, found.answer_pieces) == (3, 1, 6, 3)
    assert (found.first.total(), found.gaps.total(), found.faults) == (1, 2, {})


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (WHOLE[:-1], "an answer that is not whole"),
        ([ONE, USAGE, "[DONE]"], "an answer that is not whole"),
        ([ONE, END, "[DONE]"], "an answer that is not whole"),
        ([END, USAGE, "[DONE]"], "an answer that is not whole"),
        ([ONE, {"error": {"message": "x"}}], "an error within a stream"),
        ([ONE, "{", *WHOLE], "an event that cannot be read"),
        ([], "an answer that is not whole"),
    ],
)
def test_any_other_has_failed(given: list[Any], fault: str) -> None:
    found = answer(events_of(given))
    assert (found.faults, found.answers) == ({fault: 1}, 0)


def test_the_report() -> None:
    result = answer(events_of(WHOLE))
    result.seconds = 2.0
    lines = list(report(result))
    assert "tokens     3.0/s, 6.0 an answer" in lines
    assert any(line.startswith("first      p50 ") for line in lines)
    assert any(line.startswith("gaps       p50 ") for line in lines)
    found = as_json(result)
    assert (found["tokens_per_s"], found["tokens"], found["answers"]) == (3.0, 6, 1)
    assert found["gap_p99_us"] > 0
    assert not any(line.startswith("tokens") for line in report(LoadResult()))
    assert "tokens" not in as_json(LoadResult())


def test_what_is_asked() -> None:
    options = LoadOptions(ServerClient("http://127.0.0.1:1"), "m", length=5, tokens=9)
    body = json.loads(PROTOCOLS["text"].requests(options)[0].body)
    assert (len(body["prompt"].split()), body["max_tokens"], body["ignore_eos"]) == (5, 9, True)
    chat = PROTOCOLS["chat"].requests(options)
    assert chat[0].path == "/v1/chat/completions"
    assert len({one.body for one in chat}) > 1
    assert [one.body for one in PROTOCOLS["text"].requests(options, b"{}")] == [b"{}"]


@pytest.mark.parametrize("protocol", ["text", "chat"])
def test_a_whole_run(protocol: str, tmp_path: Any) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving([(1, "a"), (2, "b")], folder=tmp_path) as url:
        arguments = ["tiny", "--url", url, "--protocol", protocol, "-d", "1", "--warm-up", "0", "--json"]
        result = CliRunner().invoke(main, ["bench", *arguments, "-c", "3", "--tokens", "5"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens"] == 5 * found["answers"] > 0
    assert found["statuses"] == {"200": found["requests"]}


def test_a_run_whose_answers_break_off_fails() -> None:
    with serving([(1, "a")], fail_after=2) as url:
        arguments = ["tiny", "--url", url, "--protocol", "text", "-d", "1", "--warm-up", "0", "-c", "1"]
        result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
