"""The demo's model behind OpenAI's and TGI's APIs: what is told of tokens is true of the text."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserve.demo import demo_repository
from tests.running import Running

PROMPT = "LAWYER, n."


@pytest.fixture(scope="module", params=["numpy", "torch"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("demo")
    scribe = Path(shutil.copytree(demo_repository() / "scribe", folder / "models" / "scribe"))
    (scribe / "model.yaml").write_text(f"backend: text\ntext: {{runtime: {request.param}}}\n")
    with Running(folder / "models", folder / "log", torch=request.param == "torch") as running:
        yield f"http://{running.http}"


def post(url: str, **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def test_offsets_and_logprobs_of_an_echoed_prompt(server: str) -> None:
    asked: dict[str, Any] = {"model": "scribe", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    told = post(f"{server}/v1/completions", logprobs=2, echo=True, **asked)["choices"][0]
    scored = told["logprobs"]
    begins = scored["text_offset"]
    assert scored["tokens"][0] == "<|endoftext|>"
    assert begins[:2] == [0, 0], "what begins a text is none of it"
    for token, begin in list(zip(scored["tokens"], begins, strict=True))[1:]:
        assert told["text"][begin : begin + len(token)] == token
    made = len(scored["tokens"]) - 3
    for token, logprob, best in list(
        zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True)
    )[made:]:
        assert best[token] == logprob == max(best.values()), "the most likely was chosen"
    whole = PROMPT + post(f"{server}/v1/completions", **asked)["choices"][0]["text"]
    assert told["text"] == whole


def test_characters_of_several_tokens(server: str) -> None:
    """Each of the tokens has a name of its own, and none of them moves what follows."""
    prompt = "né 🎉."
    told = post(
        f"{server}/v1/completions",
        model="scribe",
        prompt=prompt,
        max_tokens=2,
        temperature=0,
        logprobs=1,
        echo=True,
    )["choices"][0]
    names, begins = told["logprobs"]["tokens"], told["logprobs"]["text_offset"]
    parts = [name.removeprefix("bytes:") for name in names if name.startswith("bytes:")]
    assert "".join(parts) == r"\xc3\xa9\xf0\x9f\x8e\x89"
    assert begins[names.index(".")] == len(prompt) - 1
    assert begins[-2] == len(prompt)


def test_the_prompt_is_scored_as_it_would_be_written(server: str) -> None:
    """A token of an answer has the logprob that it has as a token of a prompt."""
    asked = {"model": "scribe", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    first = post(f"{server}/v1/completions", prompt=PROMPT, **asked)["choices"][0]
    longer = post(f"{server}/v1/completions", prompt=PROMPT + first["text"], echo=True, **asked)["choices"][0]
    again = longer["logprobs"]["token_logprobs"][-8:-4]
    assert again == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-3)


def test_seeds_of_choices_follow_each_other(server: str) -> None:
    asked = {"model": "scribe", "prompt": PROMPT, "max_tokens": 8, "temperature": 1}
    two = post(f"{server}/v1/completions", n=2, seed=7, **asked)["choices"]
    alone = [post(f"{server}/v1/completions", seed=seed, **asked)["choices"][0] for seed in (7, 8)]
    assert [choice["text"] for choice in two] == [choice["text"] for choice in alone]


def test_tgi_tells_of_the_same_tokens(server: str) -> None:
    parameters = {"max_new_tokens": 3, "decoder_input_details": True, "top_n_tokens": 2}
    details = post(f"{server}/generate", inputs=PROMPT, parameters=parameters)["details"]
    assert "".join(each["text"] for each in details["prefill"][1:]) == PROMPT
    assert details["prefill"][0]["logprob"] is None
    assert [best["id"] for best, _ in details["top_tokens"]] == [each["id"] for each in details["tokens"]]
    pieces = post(f"{server}/tokenize", inputs=PROMPT)
    assert [piece["id"] for piece in pieces] == [each["id"] for each in details["prefill"]]
    assert "".join(PROMPT[piece["start"] : piece["stop"]] for piece in pieces) == PROMPT
