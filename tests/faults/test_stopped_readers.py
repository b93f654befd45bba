"""Clients that are stopped (SIGSTOP) in the middle of a streamed answer, over every API of text that streams.

Each has a connection of its own whose window takes a few events: from then on the server may send nothing.
The sequences stand still within `reader_tokens`; at the deadline they and their compiled grammars are given
back, while the clients are stopped still. Grammars are large: those of one round leave no room for another's.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve._ext.http2_frames import frame
from fastserve.backends.llm.grammars import MOST_HELD_CHARACTERS
from fastserve.demo import demo_repository
from tests.faults.costs import framed
from tests.faults.flooding import ACK, END_HEADERS, HEADERS, PREFACE, SETTINGS, block
from tests.faults.rig import Http
from tests.memory_watch import own_bytes
from tests.running import Running, until

MB = 1 << 20
LARGE, SMALL = 16, 2  # clients whose grammar is large, and whose is of tools
CHARACTERS = 62_000  # of a large one
TOKENS, READER_TOKENS = 900, 8  # of an answer, and those that its client may be behind
WINDOW = 1200  # bytes: the first events of an answer
DEADLINE_S = 12.0
SPEAKS = {"model": "scribe", "stream": True, "temperature": 1}
LONG = {"type": "object", "properties": {"name": {"type": "string", "minLength": 4000}}, "required": ["name"]}
GREETING = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, WINDOW)) + frame(SETTINGS, ACK, 0, b"")
CLIENT = """
import base64, os, signal, socket, sys

place, greeting, *requests = sys.stdin.read().split()
host, _, port = place.rpartition(":")
links = []
for request in requests:
    link = socket.create_connection((host, int(port)), 60)
    link.sendall(base64.b64decode(greeting))
    links.append((link, link.recv(1)))  # its greeting opens wide windows
    link.sendall(base64.b64decode(request))
for link, came in links:
    while True:  # until it has a part of its answer
        size = int.from_bytes(came[:3], "big") + 9
        if len(came) < max(size, 9):
            came += link.recv(1) or sys.exit("the server hung up")
        elif came[3] == 0 and size > 9:
            break
        else:
            came = came[size:]
    print(came[9:60], flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def schema(number: int) -> dict[str, Any]:
    """A large one, and another for each number."""
    return {**LONG, "description": f"{number} {'x' * (CHARACTERS - len(json.dumps(LONG)) - 60)}"}


def requests(model: str, first: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies, of grammars from this number on."""
    said, common = [{"role": "user", "content": "hi"}], {**SPEAKS, "model": model}
    for number in range(first, first + LARGE, 4):
        wanted = [{"name": "x", "schema": schema(number + at)} for at in range(4)]
        form = {"type": "json_schema", "json_schema": wanted[0]}
        likely = {"logprobs": True, "top_logprobs": 20}  # long events
        yield "/v1/chat/completions", {**common, "messages": said, "response_format": form, **likely}
        yield "/v1/completions", {**common, "prompt": "hi", "guided_json": wanted[1]["schema"], "logprobs": 5}
        text = {"format": {"type": "json_schema", **wanted[2]}}
        yield "/v1/responses", {**common, "input": "hi", "text": text}
        parameters = {"grammar": {"type": "json", "value": wanted[3]["schema"]}, "max_new_tokens": TOKENS}
        parameters |= {"adapter_id": model} if model != "scribe" else {}
        yield "/generate_stream", {"inputs": "hi", "parameters": {**parameters, "top_n_tokens": 5}}
    tool = {"name": f"find_{first}", "description": "Find a person."}
    function = {"type": "function", "function": {**tool, "parameters": LONG}}
    tools = {"tools": [function], "tool_choice": "required"}
    yield "/v1/chat/completions", {**common, "messages": said, **tools}
    tools = {"tools": [{**tool, "input_schema": LONG}], "tool_choice": {"type": "any"}}
    yield "/v1/messages", {**common, "messages": said, **tools}


def request(path: str, body: dict[str, Any]) -> bytes:
    """All that a client of HTTP/2 sends behind its greeting."""
    said = json.dumps(
        {**body, "max_output_tokens" if path == "/v1/responses" else "max_tokens": TOKENS}
    ).encode()
    head = block(path, "POST", ("content-type", "application/json"))
    return frame(HEADERS, END_HEADERS, 1, head) + framed(memoryview(said), last=True)


@contextlib.contextmanager
def stopped(served: Running, sent: list[bytes]) -> Iterator[None]:
    """Clients in one process, which is stopped when each has a part of its answer; they leave at the end."""
    command = [sys.executable, "-S", "-c", CLIENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            lines = [served.http.encode(), *map(base64.b64encode, (GREETING, *sent))]
            process.stdin.write(b"\n".join(lines))
            process.stdin.close()
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status
            parts = os.read(process.stdout.fileno(), 1 << 20).decode().splitlines()
            assert len(parts) == len(sent)
            assert not [part for part in parts if "error" in part]
            yield
        finally:
            process.kill()


def counts(http: Http) -> dict[str, float]:
    lines = http.ask("GET", "/metrics").body.decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] not in ("#", "")
    }


def of_text(http: Http, name: str, *labels: str) -> float:
    """The sum of a metric's values with these labels."""
    return sum(
        value
        for line, value in counts(http).items()
        if line.startswith(f"fastserve_text_{name}{{") and all(label in line for label in labels)
    )


def write_model(root: Path, runtime: str) -> str:
    """Write the model, with torch an adapter of it, and return the name that requests give."""
    scribe = Path(shutil.copytree(demo_repository() / "scribe", root / "scribe"))
    text = {"runtime": runtime, "max_sequences": LARGE + SMALL + 2, "max_new_tokens": TOKENS}
    text["reader_tokens"] = READER_TOKENS
    (scribe / "model.yaml").write_text(yaml.safe_dump({"backend": "text", "text": text}))
    if runtime == "numpy":
        return "scribe"
    from tests.backends.llm.folders import read_model
    from tests.backends.llm.test_lora import ALL, save_adapter
    from tests.backends.llm.test_lora import SETTINGS as ADAPTERS

    save_adapter(scribe / "1" / "adapters" / "first", read_model(scribe / "1"), ALL, ADAPTERS[0])
    return "first"


@pytest.mark.parametrize("runtime", ["numpy", pytest.param("torch", marks=pytest.mark.torture)])
def test_stopped_clients_hold_nothing_beyond_their_deadline(tmp_path: Path, runtime: str) -> None:
    model = write_model(tmp_path / "models", runtime)
    options = ("--limits-write-stall-s", "600", "--limits-reply-bytes-per-s", "0")
    options += ("--textgen-e2e-timeout-s", str(DEADLINE_S))
    with Running(tmp_path / "models", tmp_path / "log", *options, torch=runtime == "torch") as served:
        check(served, model)
        assert "Traceback" not in served.log.read_text()


def check(served: Running, model: str) -> None:
    clients = LARGE + SMALL
    with Http(served) as http:
        ask_little(http)
        base = own_bytes(served.pid)
        with stopped(served, [request(*one) for one in requests(model, 0)]):
            assert of_text(http, "running") == clients
            ask_little(http)
            until(lambda: not is_running(http), "their time is up")
            assert of_text(http, "sequences_total", 'finish="length"') == 2, "those of the other client"
            assert of_text(http, "sequences_total") == clients + 2
            assert of_text(http, "tokens_total") < clients * TOKENS * 2 / 3
            assert own_bytes(served.pid) - base < 32 * MB
            with stopped(served, [request(*one) for one in requests(model, LARGE)]):
                ask_little(http)
        assert LARGE * CHARACTERS < MOST_HELD_CHARACTERS < (LARGE + 1) * CHARACTERS
        until(lambda: not is_running(http), "they have left")
        until(lambda: counts(http)['fastserve_memory_bytes{state="used"}'] < MB, "their bytes are given back")


def is_running(http: Http) -> bool:
    return of_text(http, "running") + of_text(http, "waiting") > 0


def ask_little(http: Http) -> None:
    """Another client, whose stream goes on."""
    asked = {**SPEAKS, "prompt": "hi", "max_tokens": 4, "guided_regex": "[a-f]{40}"}
    told = http.post("/v1/completions", asked)
    assert (told.status, told.body.count(b"data: ")) == (200, 6), told.body
