"""`fastserve bench --protocol text`: what of a stream is counted, and whole runs against a scripted model."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest
from click.testing import CliRunner

from fastserve.cli import main
from fastserve.cli.load.chats import Chats, Completions
from fastserve.cli.load.counters import Counters
from fastserve.cli.load.events import EventsConnection
from fastserve.cli.load.report import as_json, text
from fastserve.cli.load.requests import Target, Wish
from fastserve.cli.load.run import Outcome
from fastserve.cli.rest import Server
from tests.cli.text_server import serving

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ONE, TWO = {"choices": [{"text": "a"}]}, {"choices": [{"delta": {"content": "b"}}]}
END = {"choices": [{"text": "", "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 6}}
WHOLE = [ONE, TWO, TWO, END, USAGE, "[DONE]"]


class Wire:
    """A transport that keeps what is done with it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.cut = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.cut = True


def events_of(given: list[Any]) -> bytes:
    lines = (one if isinstance(one, str) else json.dumps(one) for one in given)
    return "".join(f"data: {line}\n\n" for line in lines).encode()


class NoLoop(EventsConnection):
    """On a transport of the test's own, without a loop."""

    def __init__(self, counters: Counters, wire: Wire) -> None:
        self.requests, self.counters = cycle([b"ask"]), counters
        self.body_bytes = self.sent_ns = 0
        self._begin()
        self.connection_made(wire)  # type: ignore[arg-type]


def answer(body: bytes, size: int = 1 << 20) -> tuple[dict[str, Any], Wire]:
    """What was counted of one answer, whose body came in pieces of `size`."""
    counters, wire = Counters(), Wire()
    counters.counting = True
    connection = NoLoop(counters, wire)
    connection.ask()
    connection.data_received(HEAD)
    for start in range(0, len(body), size):
        piece = body[start : start + size]
        connection.data_received(b"%x\r\n%b\r\n" % (len(piece), piece))
    connection.data_received(b"0\r\n\r\n")
    return counters.result(), wire


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_whole_answer_is_counted_however_it_comes(size: int) -> None:
    found, wire = answer(events_of(WHOLE), size)
    texts = found["texts"]
    assert (texts["pieces"], texts["answers"]) == (3, [1, 6, 3])
    assert (sum(texts["first"].values()), sum(texts["gaps"].values())) == (1, 2)
    assert (found["statuses"], found["faults"]) == ({"200": 1}, {})
    assert len(wire.written) == 2


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
    found, wire = answer(events_of(given))
    assert (found["faults"], found["statuses"], found["texts"]["answers"]) == ({fault: 1}, {}, [0, 0, 0])
    assert wire.cut


def test_the_report() -> None:
    outcome = Outcome()
    outcome.add({**answer(events_of(WHOLE))[0], "seconds": 2.0})
    lines = list(text(outcome))
    assert "tokens     3.0/s, 6.0 an answer" in lines
    assert any(line.startswith("first      p50 ") for line in lines)
    assert any(line.startswith("gaps       p50 ") for line in lines)
    found = as_json(outcome)
    assert (found["tokens_per_s"], found["tokens"], found["answers"]) == (3.0, 6, 1)
    assert found["gap_p99_us"] > 0
    assert not any(line.startswith("tokens") for line in text(Outcome()))
    assert "tokens" not in as_json(Outcome())


def test_what_is_asked() -> None:
    target, wish = Target(Server("http://127.0.0.1:1")), Wish("m", length=5, tokens=9)
    body = json.loads(Completions().requests(target, wish)[0].body)
    assert (len(body["prompt"].split()), body["max_tokens"], body["ignore_eos"]) == (5, 9, True)
    chat = Chats().requests(target, wish)
    assert chat[0].path == "/v1/chat/completions"
    assert len({one.body for one in chat}) > 1
    own = Completions().requests(target, Wish("m", data=b"{}"))
    assert [one.body for one in own] == [b"{}"]


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
