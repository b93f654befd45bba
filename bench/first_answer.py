"""The way from nothing to the first right answer: what it takes in seconds, CPU seconds and megabytes.

    python3 bench/first_answer.py serve           # `make serve` in a fresh clone of the last commit
    python3 bench/first_answer.py wheel WHEEL     # an environment, the wheel, `fastserve serve demo`

It needs Python and its standard library; `serve` needs git and make too. Packages come from pip's index or
cache. Exit status 1: a bound was passed, or something was installed that is not needed.

CPU time is that of all processes, until the server is stopped again. Megabytes are what the files occupy: the
environment, compiled modules, and what they were compiled from.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "LAWYER, n."
CONTINUED = "  A person who has"  # greedy, five tokens
ZERO = "0 0 5 11 4 1 0 0 0 0 15 16 16 11 0 0 0 2 16 9 2 12 4 0 0 6 13 0 0 6 6 0 \
0 3 13 0 0 5 9 0 0 3 16 0 0 6 8 0 0 0 13 12 8 16 7 0 0 0 4 13 12 10 0 0"
PICTURE = {"name": "image", "datatype": "FP32", "shape": [1, 64], "data": [*map(int, ZERO.split())]}
DIGIT = [{"name": "digit", "datatype": "INT64", "shape": [1], "data": [0]}]
# Seconds to the first answer, CPU seconds, megabytes; None: as it comes.
BOUNDS: dict[str, tuple[float, float | None, float | None]] = {
    "serve": (120, 220, 220),
    "wheel": (20, None, None),
}
WAIT_S = 1200
UNNEEDED = ("torch", "transformers", "sklearn", "onnxruntime", "mypy", "pytest")


def main() -> int:
    """Measure, print a line a figure, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve")
    commands.add_parser("wheel").add_argument("wheel", type=Path)
    parser.add_argument("--keep", type=Path, help="a new folder to work in, which is left behind")
    parser.add_argument("--unbounded", action="store_true", help="figures do not change the exit status")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastserve-first-") as temporary:
        home = asked.keep or Path(temporary)
        started = time.monotonic()
        if asked.command == "serve":
            seconds = from_clone(home / "checkout", started)
        else:
            seconds = from_wheel(home, asked.wheel.resolve(), started)
        return report(asked.command, home, seconds, asked.unbounded)


def from_clone(checkout: Path, started: float) -> float:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    command = ["make", "-s", "serve", f"PYTHON={sys.executable}"]
    with answering(command, checkout, make=True) as url:
        right_answers(url)
        return time.monotonic() - started


def from_wheel(home: Path, wheel: Path, started: float) -> float:
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    pip = [str(home / "venv/bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], check=True)
    with answering([str(home / "venv/bin/fastserve"), "serve", "demo"], home) as url:
        first_token(url)
        seconds = time.monotonic() - started
        right_answers(url)
        return seconds


@contextmanager
def answering(command: list[str], folder: Path, make: bool = False) -> Iterator[str]:
    """The URL of the server that the command starts, once all its models answer; it is stopped in the end."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    flags = ["--http", address, "--grpc", "127.0.0.1:0"]
    command = [*command, f"ARGS={' '.join(flags)}"] if make else [*command, *flags]
    log = folder / "first_answer.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        deadline = time.monotonic() + WAIT_S
        while not ready(f"http://{address}/healthz/ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} serves nothing:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        yield f"http://{address}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def post(url: str, body: object) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


def first_token(url: str) -> None:
    """Read a stream's first event."""
    body = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 2}}
    with urllib.request.urlopen(post(f"{url}/infer", body), timeout=60) as reply:
        event = reply.readline()
    if json.loads(event.removeprefix(b"data: "))["token"]["text"] != CONTINUED[:1]:
        raise SystemExit(f"the first event of the stream is {event!r}")


def right_answers(url: str) -> None:
    """Ask every model of the demo."""
    for path, body, answer in (
        ("/v1/models/half_plus_two:predict", {"instances": [1.0, 5.0]}, {"predictions": [2.5, 4.5]}),
        ("/v2/models/digits/infer", {"inputs": [PICTURE], "outputs": [{"name": "digit"}]}, DIGIT),
        ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}}, {"generated_text": CONTINUED}),
    ):
        with urllib.request.urlopen(post(f"{url}{path}", body), timeout=60) as reply:
            got = json.load(reply)
        if got.get("outputs", got) != answer:
            raise SystemExit(f"{path} answers {got}, and {answer} is right")


def report(command: str, home: Path, seconds: float, unbounded: bool) -> int:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = (seconds, usage.ru_utime + usage.ru_stime, occupied(home))
    faults = 0
    names = ("seconds", "CPU seconds", "megabytes")
    for name, figure, bound in zip(names, figures, BOUNDS[command], strict=True):
        asked = f"at most {bound:g}" if bound is not None else ""
        faults += not unbounded and bound is not None and figure > bound
        print(f"{name:<12} {figure:8.1f}   {asked}")
    unneeded = [name for name in UNNEEDED if [*home.rglob(f"lib/python*/site-packages/{name}")]]
    if unneeded:
        print(f"not needed: {', '.join(unneeded)}")
    return 1 if faults or unneeded else 0


def occupied(home: Path) -> float:
    """Of a clone only what git did not bring."""
    checkout = home / "checkout"
    tracked: set[str] = set()
    if checkout.exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, stdout=subprocess.PIPE, check=True)
        tracked = {str(checkout / name) for name in listed.stdout.decode().split("\0")}
    blocks = 0
    for folder, folders, names in os.walk(home):
        if ".git" in folders:
            folders.remove(".git")
        paths = [os.path.join(folder, name) for name in names]
        blocks += sum(os.lstat(path).st_blocks for path in paths if path not in tracked)
    return blocks * 512 / 1e6


if __name__ == "__main__":
    sys.exit(main())
