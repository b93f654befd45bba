"""The response cache, loose inputs, the request log and structured answers behind three front processes, with
4 and with 64 clients, while workers and a front are killed: every answer is checked, and memory stays.

`TORTURE_S` is how many seconds each takes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import uvloop
import yaml

from fastserve.demo import demo_repository
from fastserve.net.traffic_split import hash_point
from tests import proc
from tests.backends.llm.folders import read_model
from tests.backends.llm.test_lora import ALL, SETTINGS, save_adapter
from tests.running import Running, until
from tests.torture.test_front_kills import fronts_of
from tests.torture.test_key_storm import read_answer, workers_of

pytestmark = [pytest.mark.torture, pytest.mark.timeout(900)]
SECONDS = float(os.environ.get("TORTURE_S", "30"))
FRONTS = 3
WORKER_KILL_S = 5.0
ANSWER_S = 60.0
SEQUENCES = 8
"""Of the text model, each of which ends with its worker."""
GROWTH_BYTES = 24 << 20
LOG_BYTES = 3_000_000
CACHE_BYTES = 4 << 20
"""Bytes of the response cache: it fills in the first seconds, and what grows after that is a leak."""
SOURCE = """
class Model:
    def __init__(self, config):
        pass

    def run(self, inputs):
        return {"y": inputs["x"] * 2 + 1}
"""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Question(NamedTuple):
    """A request, and whether a body answers it."""

    path: str
    body: dict[str, Any]
    is_right: Callable[[Any], bool]


def ask_rows(rng: random.Random, number: int, *, loose: bool = False) -> Question:
    """One to three rows, by REST or V2; `loose`: of another name or type than the model's, or by columns."""
    rows = [[float(rng.randrange(30)), float(rng.randrange(3))] for _ in range(rng.randrange(1, 4))]
    wanted = [[2 * value + 1 for value in row] for row in rows]
    if rng.random() < 0.4 and not loose:
        return Question(
            "/v1/models/twice:predict", {"instances": rows}, lambda told: bool(told["predictions"] == wanted)
        )
    name, datatype = ("x", "FP64")
    if loose:
        name, datatype = rng.choice((("a matrix", "FP32"), ("x", "INT64"), ("x", "FP64"), ("y", "UINT8")))
    integer = "INT" in datatype
    values = [int(value) if integer else value for row in rows for value in row]
    inputs: list[dict[str, Any]] = [
        {"name": name, "shape": [len(rows), 2], "datatype": datatype, "data": values}
    ]
    table = {}
    if loose and rng.random() < 0.3:
        table = {"parameters": {"content_type": "pd"}}
        inputs = [
            {"name": f"c{at}", "shape": [len(rows)], "datatype": datatype, "data": values[at::2]}
            for at in range(2)
        ]
    flat = [value for row in wanted for value in row]
    body = {"id": f"r{number}", "inputs": inputs, **table}
    return Question(
        "/v2/models/twice/infer",
        body,
        lambda told: bool((told["id"], told["outputs"][0]["data"]) == (f"r{number}", flat)),
    )


def ask_loosely(rng: random.Random, number: int) -> Question:
    return ask_rows(rng, number, loose=True)


def ask_text(rng: random.Random, number: int) -> Question:
    """A chat, by a schema, by a regular expression, or by nothing."""
    body: dict[str, Any] = {
        "model": "scribe",
        "messages": [{"role": "user", "content": f"hi {rng.randrange(99)}"}],
        "max_tokens": 60,
        "seed": number,
        "temperature": 1,
    }
    match number % 3:
        case 0:
            schema = {**PERSON, "title": f"of {rng.randrange(100)}"}  # more than the worker keeps
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return Question("/v1/chat/completions", body, is_person)
        case 1:
            pattern = body["guided_regex"] = f"[a-f]{{{rng.randrange(3, 9)}}}"
            return Question(
                "/v1/chat/completions", body, lambda told: re.fullmatch(pattern, text_of(told)) is not None
            )
        case _:
            body["max_tokens"] = 20
            return Question("/v1/chat/completions", body, lambda told: isinstance(text_of(told), str))


TOOL = {"name": "find", "description": "Find a person.", "parameters": PERSON}
SAID: dict[str, str] = {}
"""Greedy answers, by request: the same from every worker, alone and in company."""
FIRST: dict[str, tuple[list[str], list[dict[str, float]]]] = {}
"""The tokens of the first answer to a request, and the two most likely ones at each place."""
NEAR = 0.05
"""Difference of log probabilities: what was seen to part answers was within 0.003."""


def ask_apis(rng: random.Random, number: int) -> Question:
    """A call of a tool over three APIs, a biased answer, or a response."""
    said = [{"role": "user", "content": f"hi {rng.randrange(9)}"}]
    body: dict[str, Any] = {"model": "scribe", "messages": said, "max_tokens": 60}
    match number % 4:
        case 0:
            more = {
                "tools": [{"type": "function", "function": TOOL}],
                "tool_choice": "required",
                "seed": number,
            }
            return Question("/v1/chat/completions", {**body, **more}, has_called)
        case 1:
            tool = {"name": TOOL["name"], "input_schema": PERSON}
            more = {"tools": [tool], "tool_choice": {"type": "any"}}
            return Question("/v1/messages", {**body, **more}, has_used)
        case 2:
            biased = {
                **body,
                "max_tokens": 8,
                "temperature": 0,
                "logit_bias": {str(rng.randrange(300, 400)): 100},
            }
            return Question("/v1/chat/completions", biased, says_the_same(biased, text_of))
        case _:
            plain = {
                "model": "scribe",
                "input": said[0]["content"],
                "max_output_tokens": 16,
                "temperature": 0,
            }
            return Question("/v1/responses", plain, says_the_same(plain, response_of))


def ask_adapters(rng: random.Random, number: int) -> Question:
    """A greedy answer of the base or of one of its adapters."""
    model, prompt = rng.choice(("scribe", "first", "second")), f"In the {rng.randrange(9)}"
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    return Question("/v1/completions", body, partial(parts_at_near_ties, json.dumps(body)))


def parts_at_near_ties(asked: str, told: Any) -> bool:
    """Whether an answer is the first one to the same request, at least up to a token for which two were
    nearly as likely: a number of int8 that lies between two is rounded as the company of a step has it."""
    tokens, ranked = (told["choices"][0]["logprobs"][key] for key in ("tokens", "top_logprobs"))
    first, first_ranked = FIRST.setdefault(asked, (tokens, ranked))
    at = next((i for i, pair in enumerate(zip(tokens, first, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return len(tokens) == len(first)
    gaps = (sorted(best[at].values()) for best in (ranked, first_ranked))
    return all(len(gap) > 1 and gap[-1] - gap[-2] < NEAR for gap in gaps)


def ask_to_repeat(rng: random.Random, number: int) -> Question:
    """A greedy answer to a prompt that repeats itself: drafts of it may be made."""
    prompt = f"In the {rng.randrange(9)} beginning. " * 6
    body = {"model": "scribe", "prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 2}
    return Question("/v1/completions", body, partial(parts_at_near_ties, json.dumps(body)))


@cache
def forest() -> tuple[Any, Any, Any]:
    """A forest, rows of its kind, and their probabilities by scikit-learn."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    rows = np.random.default_rng(1).normal(size=(500, 6))
    labels = (rows[:, 0] * rows[:, 1] > rows[:, 2]).astype(int)
    model = ensemble.RandomForestClassifier(40, random_state=1).fit(rows, labels)
    return model, rows, model.predict_proba(rows)


def ask_trees(rng: random.Random, number: int) -> Question:
    """The probabilities of one to forty rows, to the last bit."""
    _, rows, probabilities = forest()
    chosen = rng.sample(range(len(rows)), rng.choice((1, 2, 5, 40)))
    data, wanted = rows[chosen].ravel().tolist(), probabilities[chosen].ravel().tolist()
    part = {"name": "input", "shape": [len(chosen), 6], "datatype": "FP64", "data": data}
    body = {"inputs": [part], "outputs": [{"name": "probabilities"}]}
    return Question("/v2/models/forest/infer", body, lambda told: bool(told["outputs"][0]["data"] == wanted))


def ask_as_a_user(rng: random.Random, number: int) -> Question:
    """Rows of a user, whose version of the model stays the one that its value leads to."""
    user, value = rng.randrange(1000), float(rng.randrange(30))
    version = 2 if hash_point(str(user).encode()) < 0.5 else 1
    parts = [
        {"name": "x", "shape": [1, 2], "datatype": "FP64", "data": [value, value]},
        {"name": "user", "shape": [1, 1], "datatype": "INT64", "data": [user]},
    ]
    wanted = [value * 2 + version] * 2
    return Question(
        "/v2/models/twice/infer", {"inputs": parts}, lambda told: bool(told["outputs"][0]["data"] == wanted)
    )


def says_the_same(body: dict[str, Any], read: Callable[[Any], str]) -> Callable[[Any], bool]:
    return lambda told: SAID.setdefault(json.dumps(body), read(told)) == read(told)


def response_of(told: Any) -> str:
    return "".join(part["text"] for item in told["output"] for part in item["content"])


def has_called(told: Any) -> bool:
    (choice,) = told["choices"]
    calls = choice["message"].get("tool_calls") or []
    return choice["finish_reason"] == "length" or (
        all(is_call(call["function"]) for call in calls) and bool(calls)
    )


def is_call(function: Any) -> bool:
    return function["name"] == "find" and set(json.loads(function["arguments"])) == {"name", "age"}


def has_used(told: Any) -> bool:
    used = [block for block in told["content"] if block["type"] == "tool_use"]
    return told["stop_reason"] == "max_tokens" or (bool(used) and set(used[0]["input"]) == {"name", "age"})


def text_of(told: Any) -> str:
    return str(told["choices"][0]["message"]["content"])


def is_person(told: Any) -> bool:
    if told["choices"][0]["finish_reason"] == "length":
        return True  # the beginning of one
    found = json.loads(text_of(told))
    return set(found) == {"name", "age"} and len(found["name"]) <= 12 and found["age"] <= 150


class Capability(NamedTuple):
    """What is under load: its model's config, the server's options, and the requests."""

    ask: Callable[[random.Random, int], Question]
    config: dict[str, Any] = {}
    logs: bool = False
    text: dict[str, Any] = {}
    """The text section of scribe, if that is what is under load."""
    growth_bytes: int = GROWTH_BYTES
    """What a process may grow by after its first third of the load."""


LOGGED = {"sample": 1.0, "max_bytes": LOG_BYTES}
CAPABILITIES = {
    "cache": Capability(ask_rows, {"cache": True}),
    "loose inputs": Capability(ask_loosely, {"loose_inputs": True}),
    "request log": Capability(ask_rows, {"request_log": LOGGED}, logs=True),
    "request log and cache": Capability(ask_rows, {"request_log": LOGGED, "cache": True}, logs=True),
    # A worker keeps grammars that have been used: 64 MB in the first 25 s, none in the minute after that.
    "structured answers": Capability(ask_text, text={"runtime": "numpy"}, growth_bytes=80 << 20),
    "text APIs": Capability(ask_apis, text={"runtime": "numpy"}),
    "drafts": Capability(ask_to_repeat, text={"runtime": "torch", "prompt_lookup_num_tokens": 8}),
    "text by torch": Capability(ask_to_repeat, text={"runtime": "torch"}),
    "trees": Capability(ask_trees),
    "a sticky input": Capability(ask_as_a_user, {"sticky": {"input": "user"}}),
    "adapters of int8": Capability(ask_adapters, text={"runtime": "torch", "quantization": "int8"}),
}


def write_models(folder: Path, capability: Capability) -> None:
    if capability.text:
        scribe = Path(shutil.copytree(demo_repository() / "scribe", folder / "scribe"))
        text = {"max_sequences": SEQUENCES, **capability.text}
        (scribe / "model.yaml").write_text(yaml.safe_dump({"backend": "text", "text": text, "instances": 2}))
        if capability.ask is ask_adapters:
            for number, name in enumerate(("first", "second")):
                save_adapter(
                    scribe / "1" / "adapters" / name, read_model(scribe / "1"), ALL, SETTINGS[number]
                )
        return
    if capability.ask is ask_trees:
        (folder / "forest" / "1").mkdir(parents=True)
        with (folder / "forest" / "1" / "model.pkl").open("wb") as file:
            pickle.dump(forest()[0], file)
        config: dict[str, Any] = {"backend": "sklearn", "instances": 2, "max_batch_size": 64}
        config["parameters"] = {"trust_pickle": True}
        (folder / "forest" / "model.yaml").write_text(yaml.safe_dump(config))
        return
    tensor = {"dtype": "float64", "shape": [2]}
    config = {"backend": "python", "inputs": {"x": tensor}, "outputs": {"y": tensor}}
    numbers = [1]
    if "sticky" in capability.config:
        numbers = [1, 2]
        config["inputs"] = {"x": tensor, "user": {"dtype": "int64", "shape": [1]}}
        config |= {
            "version_policy": "all",
            "labels": {"stable": 1, "canary": 2},
            "traffic": {"stable": 50, "canary": 50},
        }
    for number in numbers:
        (folder / "twice" / str(number)).mkdir(parents=True)
        (folder / "twice" / str(number) / "model.py").write_text(SOURCE.replace("1}", f"{number}}}"))
    more = {"max_batch_size": 16, "instances": 2, **capability.config}
    (folder / "twice" / "model.yaml").write_text(yaml.safe_dump({**config, **more}))


@dataclass
class Report:
    """What the clients have seen, and the memory of the server's processes."""

    over_s: float
    answers: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[int]] = field(default_factory=dict)
    """Private bytes of each process, by its name and id; of all shared ones together."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.over_s


async def ask_all(
    address: tuple[str, int], capability: Capability, report: Report, numbers: Iterator[int]
) -> None:
    """One client, which comes again when its front was killed."""
    while not report.over:
        try:
            reader, writer = await asyncio.open_connection(*address)
            with closing(writer):
                while not report.over:
                    number = next(numbers)
                    question = capability.ask(random.Random(number), number)
                    body = json.dumps(question.body).encode()
                    head = f"POST {question.path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
                    writer.write(head.encode() + body)
                    status, told = await asyncio.wait_for(read_answer(reader), ANSWER_S)
                    if status != 200:
                        report.refused[status] += 1
                    elif question.is_right(json.loads(told)):
                        report.answers += 1
                    else:
                        report.wrong.append(f"{question.body}: {told!r}")
        except (ConnectionError, asyncio.IncompleteReadError):
            report.lost += 1


async def kill(served: Running, report: Report) -> None:
    """Kill a worker every few seconds, and a front process once in the middle."""
    began_s = time.monotonic()
    while not report.over:
        await asyncio.sleep(min(WORKER_KILL_S, SECONDS / 6))  # the pace of the bar
        part = (time.monotonic() - began_s) / SECONDS
        fronts = fronts_of(served)
        kinds = {"front": fronts, "worker": sorted(workers_of(served) - set(fronts))}
        kind = "front" if part > 0.4 and not report.kills["front"] else "worker"
        if kinds[kind] and part < 0.9:
            with suppress(ProcessLookupError):
                os.kill(random.choice(kinds[kind]), signal.SIGKILL)
                report.kills[kind] += 1


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes that are a process's own, and its share of what it has with others; 0 once it has ended."""
    private = shared = 0
    for line in proc.read(pid, "smaps_rollup").splitlines():
        name, _, size = line.partition(":")
        if name.startswith("Private_"):
            private += int(size.split()[0]) << 10
        elif name == "Pss_Shmem":
            shared += int(size.split()[0]) << 10
    return private, shared


async def watch_memory(served: Running, report: Report) -> None:
    while not report.over:
        await asyncio.sleep(SECONDS / 20)
        fronts, shared = set(fronts_of(served)), 0
        for pid in (served.pid, *served.workers):
            private, part = memory_of(pid)
            shared += part
            if private:
                kind = "owner" if pid == served.pid else "front" if pid in fronts else "worker"
                report.memory.setdefault(f"{kind} {pid}", []).append(private)
        report.memory.setdefault("shared memory", []).append(shared)


@pytest.mark.parametrize("clients", [4, 64])
@pytest.mark.parametrize("name", CAPABILITIES)
def test_answers_under_kills(tmp_path: Path, name: str, clients: int) -> None:
    capability, logs = CAPABILITIES[name], tmp_path / "logs"
    write_models(tmp_path / "models", capability)
    options = ["--frontends", str(FRONTS), "--response-cache-bytes", str(CACHE_BYTES)]
    if capability.logs:
        options += ["--request-log-folder", str(logs)]
    with Running(tmp_path / "models", tmp_path / "log", *options) as served:
        until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is there")
        host, _, port = served.http.rpartition(":")

        async def work() -> Report:
            report, numbers = Report(time.monotonic() + SECONDS), itertools.count()
            asking = [ask_all((host, int(port)), capability, report, numbers) for _ in range(clients)]
            await asyncio.gather(kill(served, report), watch_memory(served, report), *asking)
            return report

        report = uvloop.run(work())
        until(lambda: len(fronts_of(served)) == FRONTS - 1, "every front is back")
        check(report, capability, tmp_path / "log")
    if capability.logs:
        check_log(logs, report)


def check(report: Report, capability: Capability, log: Path) -> None:
    print(f"{report.answers} answers, {dict(report.refused)}, {report.lost} lost, {dict(report.kills)}")
    print(
        {
            name: [size >> 10 for size in (sizes[0], max(sizes), sizes[-1])]
            for name, sizes in report.memory.items()
        }
    )
    assert not report.wrong, (len(report.wrong), report.wrong[:3])
    assert report.answers > 100
    assert report.kills["front"] == 1
    assert report.kills["worker"] >= 2
    # What runs ends with its worker: a batch is tried once more, but what has been begun of a text is gone.
    most = SEQUENCES if capability.text else 0
    assert report.refused.total() <= most * report.kills["worker"], report.refused
    assert set(report.refused) <= {500, 503}
    assert "Traceback" not in log.read_text()
    for name, sizes in report.memory.items():
        warm = sizes[len(sizes) // 3 :]
        if len(warm) > 3:
            assert warm[-1] - warm[0] < capability.growth_bytes, (name, sizes)


def check_log(folder: Path, report: Report) -> None:
    """Every line is a whole request with its answer, and the files are within their bounds."""
    files = [path for path in folder.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LOG_BYTES
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    print(f"{len(lines)} lines in {sorted(path.name for path in files)}")
    assert min(report.answers, 100) <= len(lines)
    for line in lines:
        if line["status"] == "OK":
            (given,), (answer,) = line["inputs"], line["outputs"]
            assert answer["floats"] == [2 * value + 1 for value in given["floats"]], line
