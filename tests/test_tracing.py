"""Request ids, trace context, and log lines nobody can forge, flood or break."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve import tracing
from fastserve.tracing import (
    JSONLines,
    LogStream,
    RepeatFilter,
    TextLines,
    choose_request_id,
    escape,
    make_request_id,
    parse_traceparent,
    setup_logs,
)

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record(
    message: str, *args: object, error: BaseException | None = None, **fields: object
) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("fastserve.test", logging.WARNING, "test.py", 1, message, args, exc_info)
    vars(made).update(fields)
    return made


def test_a_sane_id_is_kept() -> None:
    for given_id in (b"abc-123", b"a" * 128, b"Root=1-67891233-abcdef012345678912345678"):
        assert choose_request_id(given_id, PARENT) == given_id.decode()


@pytest.mark.parametrize(
    "given_id", [b"", b"a" * 129, b"a\r\nb", b"a b", b"\x00", b"\xff", b'"x"', b"a\n", b"<x>"]
)
def test_another_is_replaced(given_id: bytes) -> None:
    assert choose_request_id(given_id, PARENT) == "0af7651916cd43dd8448eb211c80319c"
    assert choose_request_id(given_id) != choose_request_id(given_id)


def test_made_ids_are_unique_and_sane() -> None:
    made = [make_request_id() for _ in range(10_000)]
    assert len(set(made)) == len(made)
    assert choose_request_id(made[0].encode()) == made[0]


def test_a_forked_child_makes_other_ids() -> None:
    before = tracing._prefix
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, tracing._prefix.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 100).decode() != before
    os.close(read_end)
    os.close(write_end)


def test_traceparent() -> None:
    trace = parse_traceparent(PARENT)
    assert trace is not None
    assert (trace.trace_id, trace.span_id) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert trace.sampled
    hop = parse_traceparent(trace.next_hop())
    assert hop is not None
    assert hop.trace_id == trace.trace_id
    assert hop.span_id != trace.span_id
    assert parse_traceparent(b"01" + PARENT[2:] + b"-more") is not None


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"ff" + PARENT[2:],
        PARENT + b"-more",
        PARENT.upper(),
        PARENT + b"\n",
        PARENT[:-1],
        b"00-" + b"0" * 32 + PARENT[35:],
        PARENT[:36] + b"0" * 16 + b"-01",
        b"01" + PARENT[2:] + b"-" + b"x" * 1000,
    ],
)
def test_insane_traceparents(header: bytes) -> None:
    assert parse_traceparent(header) is None


@given(st.text(st.characters(exclude_categories=[])), st.integers(40, 300))
def test_escaped_text_is_one_bounded_visible_line(text: str, limit: int) -> None:
    shown = escape(text, limit)
    assert shown.isprintable()
    assert len(shown.encode()) <= limit
    assert escape(shown.replace("\\", ""), limit) == shown.replace("\\", "") or len(text) > limit


def test_plain_text_is_left_alone_and_escapes_are_unambiguous() -> None:
    assert escape("GET /v1/models/模型", 100) == "GET /v1/models/模型"
    assert escape("a\r\nb\x1b[31m\\n\u202e", 100) == "a\\r\\nb\\x1b[31m\\\\n\\u202e"
    assert escape("\ud800", 100) == "\\ud800"


@pytest.mark.parametrize("lines", [TextLines({"process": "front-0"}), JSONLines({"process": "front-0"})])
@pytest.mark.parametrize(
    "nasty", ["x" * 1_000_000, '"' * 1_000_000, "\x1b[2J\n" * 200_000, "模" * 1_000_000, "\ud800" * 99]
)
def test_a_line_is_one_line_under_a_kilobyte(lines: logging.Formatter, nasty: str) -> None:
    made = record("refused %s", nasty, request_id=nasty, model=nasty, more=nasty)
    made.name = "n" + nasty
    line = lines.format(made)
    assert line.isprintable()
    assert len(line.encode()) <= (1024 if isinstance(lines, TextLines) else 3072)


def test_text_line() -> None:
    made = record("loaded %s", "digits", model="digits", reason='said "no way"', empty="")
    made.created, made.msecs = 0.25, 250.0
    assert TextLines({"process": "front-0"}).format(made) == (
        "1970-01-01T00:00:00.250Z WARNING fastserve.test: loaded digits"
        ' process=front-0 model=digits reason="said \\"no way\\"" empty=""'
    )


def test_json_line() -> None:
    line = json.loads(
        JSONLines().format(record("loaded %s", "digits", model="digits", message_="m", time="forged"))
    )
    assert line["level"] == "warning"
    assert line["message"] == "loaded digits"
    assert line["model"] == "digits"
    assert line["time"] != "forged"


def caught() -> BaseException:
    try:
        raise ValueError("first\n2026-01-01T00:00:00.000Z ERROR forged: line")
    except ValueError as error:
        return error


def test_a_traceback_cannot_pose_as_a_line() -> None:
    lines = TextLines().format(record("failed", error=caught())).splitlines()
    assert len(lines) > 3
    assert all(line.startswith("  | ") for line in lines[1:])
    assert any("forged" in line for line in lines[1:])
    found = JSONLines().format(record("failed", error=caught()))
    assert "\n" not in found
    assert any("ValueError: first" in line for line in json.loads(found)["trace"])


def test_a_traceback_is_bounded() -> None:
    try:
        raise ValueError("\n".join(["y" * 10_000] * 10_000))
    except ValueError as error:
        text = TextLines().format(record("failed", error=error))
    assert len(text) < 30_000


def test_arguments_that_do_not_fit_still_make_a_line() -> None:
    assert "%d of %s" in TextLines().format(record("%d of %s", "x"))


def test_repeats_are_swallowed_and_owned_up_to() -> None:
    repeat = RepeatFilter(burst=3, window_s=10.0)
    made = [record(f"attack {i}") for i in range(100)]
    for i, one in enumerate(made):
        one.created = 1000.0 + i / 100
    assert sum(map(repeat.filter, made)) == 3
    other = record("elsewhere")
    other.lineno = 2
    assert repeat.filter(other)
    later = record("attack again")
    later.created = 1011.0
    assert repeat.filter(later)
    assert "suppressed=97" in TextLines().format(later)
    assert len(repeat._sites) == 2


def test_exempt_loggers_and_clocks_set_back() -> None:
    repeat = RepeatFilter(burst=1, window_s=10.0, exempt=("fastserve.test",))
    assert all(repeat.filter(record("access")) for _ in range(5))
    repeat = RepeatFilter(burst=1, window_s=10.0)
    first, back = record("x"), record("x")
    back.created = first.created - 3600
    assert repeat.filter(first)
    assert repeat.filter(back)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    package = logging.getLogger("fastserve")  # clients may set its level (V2 logging settings)
    before, level, package_level = logger.handlers[:], logger.level, package.level
    package.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)
    package.setLevel(package_level)
    logging.getLogger("fastserve.access").setLevel(logging.NOTSET)


def test_setup_logs(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logs("warning", "json", stream=stream, fields={"process": "front-1"})
    logging.getLogger("fastserve.x").info("not shown")
    logging.getLogger("elsewhere").warning("shown", extra={"request_id": "r1"})
    logging.getLogger("fastserve.access").info("off by default")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["request_id"] == "r1"
    assert json.loads(line)["process"] == "front-1"
    setup_logs("info", "text", access=True, stream=stream)
    logging.getLogger("fastserve.access").info("on")
    assert stream.getvalue().splitlines()[1].endswith("fastserve.access: on")


def test_a_closed_stream_costs_lines_not_requests(root: logging.Logger) -> None:
    stream = io.StringIO()
    handler = setup_logs(stream=stream)
    stream.close()
    logging.getLogger("fastserve.x").warning("lost")
    assert isinstance(handler, LogStream)
    assert handler.lost == 1
