"""`fastserve generate`: answers of a server and of a folder, whole and streamed, and what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastserve import demo
from fastserve.cli import main
from fastserve.cli.generate import AnswerProgress, Question, completion_body
from tests.cli.text_server import serving
from tests.text_rig import Said

SCRIPT: list[Said] = [(1, "Once"), (2, " upon ☃"), (3, " a"), (4, " time"), (5, None)]


def run(*args: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", *args], input=given, prog_name="fastserve")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(SCRIPT, eos={5}) as found:
        yield found


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_an_answer_and_its_speed(url: str, stream: tuple[str, ...]) -> None:
    result = run("tell me", "--url", url, *stream)
    assert result.exit_code == 0, result.output
    assert result.stdout == "Once upon ☃ a time\n"
    found = re.fullmatch(
        r"2 tokens of prompt, (\d) of answer \((\w+)\): the first after .* ms.*\n", result.stderr
    )
    assert found is not None, result.stderr
    assert found.groups() == ("5", "stop")


def test_what_is_asked_is_passed_on(url: str, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("three words here")
    result = run(f"@{tmp_path}/prompt", "-n", "2", "--url", url)
    assert result.stdout == "Once upon ☃\n"
    assert "3 tokens of prompt, 2 of answer (length)" in result.stderr
    assert run("-", "--stop", " a", "--url", url, given="word").stdout == "Once upon ☃\n"


def test_the_body_says_what_is_not_usual_and_no_more() -> None:
    plain = completion_body(Question(prompt="a"), "m")
    assert plain == {
        "model": "m",
        "prompt": "a",
        "max_tokens": 128,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = Question(prompt="a", chat=True, top_k=3, top_p=0.5, repetition_penalty=2.0, seed=0, stop=("x",))
    more = {"top_k": 3, "top_p": 0.5, "repetition_penalty": 2.0, "seed": 0, "stop": ["x"]}
    del plain["prompt"]
    message = {"role": "user", "content": "a"}
    assert completion_body(asked, "m") == {**plain, "messages": [message], **more}


def test_which_model(url: str) -> None:
    assert run("a", "--model", "tiny", "--url", url).exit_code == 0
    assert run("a", "--model", "other", "--url", url).exit_code == 0  # any name means the only model
    with serving(SCRIPT, names=("one", "two")) as two:
        missing = run("a", "--model", "other", "--url", two)
        assert (missing.exit_code, "404" in missing.stderr, "other" in missing.stderr) == (1, True, True)
        result = run("a", "--url", two)
        assert result.exit_code == 1
        assert "one, two: choose with --model" in result.stderr
        assert run("a", "--model", "two", "-n", "1", "--url", two).stdout == "Once\n"


def test_a_model_that_fails_midway_is_an_error_after_what_it_said() -> None:
    with serving(SCRIPT, fail_after=2) as url:
        result = run("a", "--stream", "--url", url)
    assert result.exit_code == 1
    assert result.stdout.startswith("Once upon ☃")
    assert "the engine failed" in result.stderr


def test_a_model_of_a_folder_needs_no_server() -> None:
    folder = str(Path(demo.__file__).parent / "scribe" / "1")
    whole = run("In the beginning", "--folder", folder, "-n", "6")
    assert whole.exit_code == 0, whole.output
    assert len(whole.stdout.split()) > 3
    assert " 6 of answer (length)" in whole.stderr
    words = whole.stdout.split()
    stopped = run("In the beginning", "--folder", folder, "-n", "6", "--stream", "--stop", words[2])
    assert stopped.stdout.split() == words[:2]
    assert "(stop)" in stopped.stderr
    empty = run("In", "--folder", str(Path(folder).parent))
    assert (empty.exit_code, "tokenizer.json cannot be read" in empty.stderr) == (1, True)


def test_a_server_that_is_not_there() -> None:
    result = run("a", "--model", "m", "--url", "http://127.0.0.1:9")
    assert (result.exit_code, "Is the server running?" in result.stderr) == (1, True)
    assert run("@/nowhere/at/all", "--model", "m").exit_code == 2


def test_the_speed_line_of_one_token_has_no_rate() -> None:
    told = AnswerProgress(prompt_tokens=3, tokens=1, reason="length", first_s=0.0123, last_s=0.0123)
    assert told.speed_line() == "3 tokens of prompt, 1 of answer (length): the first after 12.3 ms"
    told = AnswerProgress(prompt_tokens=3, tokens=11, reason="eos", first_s=0.01, last_s=0.51)
    assert told.speed_line().endswith("ms, then 20.0 tokens/s")
