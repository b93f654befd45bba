"""Five tasks of a first hour with LitServe, beside the same as models of a script: lines of code, and rates.

    python -m bench.litserve --python /tmp/lit/bin/python           an environment that has litserve

Each task is written twice, as either's documentation does such things; lines are those that are not empty.
Both servers have one worker, and wrk asks them in turns; the rates are medians. Answers are compared before
anything is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CONNECTIONS, SECONDS = 32, 2
START_S = 90.0
LIT_HEAD = "import litserve as ls\n"
LIT_TAIL = """
if __name__ == "__main__":
    ls.LitServer(API({options}), accelerator="cpu").run(port=8000)
"""
OUR_HEAD = "import fastserve\n"
OUR_TAIL = "fastserve.serve()\n"


class Task(NamedTuple):
    """One task, written for both; `body` is the request, `path` where ours takes it."""

    name: str
    theirs: str
    ours: str
    body: dict[str, Any]
    path: str
    options: str = ""


TASKS = (
    Task(
        "a square",
        """
        class API(ls.LitAPI):
            def setup(self, device):
                self.power = 2

            def decode_request(self, request):
                return request["input"]

            def predict(self, x):
                return x**self.power

            def encode_response(self, output):
                return {"output": output}
        """,
        """
        @fastserve.model
        def predict(input: float) -> dict:
            return {"output": input**2}
        """,
        {"input": 4.0},
        "/predict",
    ),
    Task(
        "two models in a row",
        """
        class API(ls.LitAPI):
            def setup(self, device):
                self.square = lambda x: x**2
                self.cube = lambda x: x**3

            def predict(self, request):
                x = request["input"]
                return {"output": self.square(x) + self.cube(x)}
        """,
        """
        @fastserve.model
        def predict(input: float) -> dict:
            square, cube = input**2, input**3
            return {"output": square + cube}
        """,
        {"input": 2.0},
        "/predict",
    ),
    Task(
        "batches",
        """
        import numpy as np

        class API(ls.LitAPI):
            def setup(self, device):
                self.weights = np.ones((4, 3), np.float32)

            def decode_request(self, request):
                return np.asarray(request["x"], np.float32)

            def predict(self, x):
                return x @ self.weights

            def encode_response(self, output):
                return {"output": output.tolist()}
        """,
        """
        import numpy as np

        WEIGHTS = np.ones((4, 3), np.float32)

        @fastserve.model(batch=64)
        def predict(x: fastserve.Array["float32", 4]) -> fastserve.Array["float32", 3]:
            return x @ WEIGHTS
        """,
        {"x": [0.1, 0.2, 0.3, 0.4]},
        "/predict",
        "max_batch_size=64, batch_timeout=0.0005",
    ),
    Task(
        "a stream",
        """
        class API(ls.LitAPI):
            def setup(self, device):
                pass

            def decode_request(self, request):
                return request["count"]

            def predict(self, count):
                yield from range(count)

            def encode_response(self, output):
                for part in output:
                    yield {"output": part}
        """,
        """
        @fastserve.model
        def predict(count: int):
            for part in range(count):
                yield {"output": part}
        """,
        {"count": 10},
        "/predict",
        "stream=True",
    ),
    Task(
        "an image in base64",
        """
        import base64

        class API(ls.LitAPI):
            def setup(self, device):
                pass

            def decode_request(self, request):
                return base64.b64decode(request["image"])

            def predict(self, image):
                return sum(image[:16])

            def encode_response(self, output):
                return {"output": output}
        """,
        """
        @fastserve.model
        def predict(image: bytes) -> dict:
            return {"output": sum(image[:16])}
        """,
        {"image": "AQID" * 2000},
        "/predict",
    ),
)


def code_of(head: str, body: str, tail: str) -> str:
    """Return a whole script."""
    return head + textwrap.dedent(body) + tail


def lines_of(script: str) -> int:
    """Count the lines that are not empty."""
    return sum(1 for line in script.splitlines() if line.strip())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def served(command: list[str], port: int, task: Task, log: Path) -> Iterator[str]:
    """Run a server in a process group of its own until it answers; it ends with the block."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with log.open("wb") as out:
        # LitServe writes a client.py into its working directory.
        process = subprocess.Popen(
            command, cwd=log.parent, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}{task.path}"
    try:
        until = time.monotonic() + START_S
        while ask(url, task.body) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(log.read_text(errors="replace")[-3000:])
            time.sleep(0.3)
        yield url
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: ask it to, and kill what is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(url: str, body: Any) -> bytes | None:
    """Return an answer, None while there is none."""
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=10) as reply:
            found: bytes = reply.read()
            return found
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def values_of(answer: bytes | None) -> list[Any]:
    """Return all that an answer says, without the names and frames that differ."""
    found: list[Any] = []
    for text in re.findall(rb"\{[^{}]*\}|\[[^{}]*\]", answer or b""):
        value = json.loads(text)
        value = value["output"] if isinstance(value, dict) else value
        found += value if isinstance(value, list) else [value]
    return [round(value, 5) for value in found]


def rate_of(url: str, body: Any, folder: Path) -> float:
    """Return wrk's requests a second. Raises SystemExit for answers that are none."""
    script = folder / "post.lua"
    head = 'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
    script.write_text(f"{head}wrk.body = [==[{json.dumps(body)}]==]\n")
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}", "-s", str(script), url]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in told:
        raise SystemExit(told)
    found = re.search(r"Requests/sec:\s+(\S+)", told)
    assert found is not None
    return float(found[1])


def compare(task: Task, python: str, rounds: int, folder: Path) -> str:
    """Return a row of the table."""
    ports = free_port(), free_port()
    tail = LIT_TAIL.format(options=task.options)
    theirs, ours = code_of(LIT_HEAD, task.theirs, tail), code_of(OUR_HEAD, task.ours, OUR_TAIL)
    files = folder / "lit_server.py", folder / "our_server.py"
    files[0].write_text(theirs.replace("port=8000", f'port={ports[0]}, host="127.0.0.1", log_level="error"'))
    files[1].write_text(ours.replace("serve()", f'serve(http="127.0.0.1:{ports[1]}", grpc="off")'))
    lit = served([python, str(files[0])], ports[0], task, folder / "lit.log")
    our = served([sys.executable, str(files[1])], ports[1], task, folder / "our.log")
    with lit as one, our as other:
        answers = values_of(ask(one, task.body)), values_of(ask(other, task.body))
        if answers[0] != answers[1] or not answers[0]:
            raise SystemExit(f"{task.name}: {answers}")
        rates = [(rate_of(one, task.body, folder), rate_of(other, task.body, folder)) for _ in range(rounds)]
    lit_rate, our_rate = (statistics.median(side) for side in zip(*rates, strict=True))
    ratio = statistics.median(ours / theirs for theirs, ours in rates)
    lines = f"{lines_of(theirs)} and {lines_of(ours)}"
    return f"| {task.name} | {lines} | {lit_rate:,.0f} and {our_rate:,.0f}/s | {ratio:.1f} x |"


def main() -> None:
    parser = argparse.ArgumentParser(description="LitServe beside models of a script")
    parser.add_argument("--python", required=True, help="an interpreter that has litserve")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| task | lines, LitServe and here | rates | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS:
            print(compare(task, options.python, options.rounds, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
