"""Log lines nobody can forge, flood or break."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from fastserve.util.logs import (
    JSONLines,
    LogStream,
    Printed,
    RepeatFilter,
    TextLines,
    current_logs,
    escape,
    setup_logs,
)


def record(
    message: str, *args: object, error: BaseException | None = None, **fields: object
) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("fastserve.test", logging.WARNING, "test.py", 1, message, args, exc_info)
    vars(made).update(fields)
    return made


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


def test_numbers_stay_numbers_in_json() -> None:
    made = record("GET /x", status=200, duration_ms=0.25, sampled=True)
    line = json.loads(JSONLines().format(made))
    assert (line["status"], line["duration_ms"], line["sampled"]) == (200, 0.25, "True")
    assert TextLines().format(made).endswith("GET /x status=200 duration_ms=0.25 sampled=True")


def test_a_process_that_is_started_logs_like_this_one(root: logging.Logger) -> None:
    setup_logs("warning", "json", stream=io.StringIO())
    assert current_logs() == {"level": logging.WARNING, "format": "json"}
    second = io.StringIO()
    setup_logs(**current_logs(), stream=second, fields={"worker": "m/1#0"})
    logging.getLogger("fastserve.x").warning("said")
    assert json.loads(second.getvalue())["worker"] == "m/1#0"


def test_what_is_printed_becomes_lines(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logs("info", "json", stream=stream)
    out = Printed(logging.getLogger("model.stdout"), logging.INFO, 1).as_text()
    print("loading", "weights", file=out)
    print("a", end="", file=out)
    print("b\n\nc\x1b[31m", file=out)
    out.buffer.write(b"raw \xff\n")
    print("x" * 10_000, file=out)
    out.write("the rest")
    out.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {line["logger"] for line in lines} == {"model.stdout"}
    said = [line["message"] for line in lines]
    assert said[:4] == ["loading weights", "ab", "c\\x1b[31m", "raw \\\\xff"]
    assert "".join(said[4:-1]) == "x" * 10_000
    assert said[-1] == "the rest"


def test_a_progress_bar_is_one_line_of_its_last_state_and_no_warning(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logs("info", "json", stream=stream)
    err = Printed(logging.getLogger("model.stderr"), logging.WARNING, 2).as_text()
    tqdm.monitor_interval = 0  # without its thread
    for bar in tqdm(range(1000), desc="weights", file=err, mininterval=0):
        assert bar >= 0
    print("ends as on Windows\r\nplain", file=err)
    err.write("\r  1/2")
    err.write("\r  2/2\n\x1b[A")
    err.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    first, *rest = [(line["level"], line["message"]) for line in lines]
    assert first[0] == "info"
    assert first[1].startswith("weights: 100%")
    assert rest == [("warning", "ends as on Windows"), ("warning", "plain"), ("info", "  2/2")]


def test_a_model_that_says_much_is_not_held_back(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logs("info", "text", stream=stream)
    out = Printed(logging.getLogger("model.stdout"), logging.INFO, 1).as_text()
    for number in range(100):
        print(number, file=out)
    out.close()
    assert len(stream.getvalue().splitlines()) == 100


UNCAUGHT = """
import threading, warnings
from fastserve.util.logs import log_prints, log_uncaught, setup_logs
setup_logs("info", "json", fields={"worker": "m/1#0"})
log_prints(); log_uncaught()
warnings.warn("old")
class Bad:
    def __del__(self): raise KeyError("ignored")
Bad()
def fail(): raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="t1"); thread.start(); thread.join()
print("printed")
raise RuntimeError("the end")
"""


def test_every_line_of_a_process_is_json_even_the_last() -> None:
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(line["worker"] == "m/1#0" for line in lines)
    said = [line["message"] for line in lines]
    assert "old" in said[0]
    assert said[1:] == [
        "an exception was ignored",
        "an exception ended thread t1",
        "printed",
        "an exception ended the process",
    ]
    assert [line["trace"][-1] for line in lines if "trace" in line] == [
        "KeyError: 'ignored'",
        "ValueError: in a thread",
        "RuntimeError: the end",
    ]
