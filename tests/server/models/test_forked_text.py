"""Text models of a server are workers forked from one import of torch and transformers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastserve
from tests import proc
from tests.running import free_port, until
from tests.server.lifecycle.test_orphans import all_end

STARTS_PROCESSES = True
SCRIBE = Path(fastserve.__file__).parent / "demo" / "scribe"
IMPORTS = "imports torch and transformers"


def ask(port: int, method: str, target: str, body: Any = None) -> tuple[int, Any]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request(method, target, json.dumps(body) if body else None)
        with link.getresponse() as reply:
            return reply.status, json.loads(reply.read() or b"null")
    finally:
        link.close()


def write(port: int, model: str) -> str:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    status, said = ask(port, "POST", "/v1/completions", body)
    assert status == 200, said
    return str(said["choices"][0]["text"])


def test_two_models_load_from_one_import_and_end_with_their_owner(tmp_path):
    models = tmp_path / "models"
    for name, more in (("one", ""), ("other", "threads: 2\n")):
        shutil.copytree(SCRIBE, models / name)
        config = models / name / "model.yaml"
        config.write_text(config.read_text().replace("runtime: numpy", "runtime: torch") + more)
    port, log = free_port(), tmp_path / "log"
    options = ["--http", f"127.0.0.1:{port}", "--grpc", "off", "--drain-delay-s", "0"]
    command = [sys.executable, "-m", "fastserve.cli", "serve", str(models), *options]
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as owner:
        try:
            assert owner.stdout is not None
            until(lambda: IMPORTS in log.read_text(), "the fork server imports")
            status, said = ask(port, "GET", "/healthz/ready")
            reasons = {model["reason"] for model in said["models"].values()}
            assert status == 503
            assert "loading: importing torch and transformers" in reasons
            assert b"ready" in owner.stdout.readline(), log.read_text()
            assert ask(port, "GET", "/healthz/ready")[0] == 200
            workers = {proc.name_of(pid): pid for pid in proc.children_of(owner.pid)}
            forks = workers.pop("fs:fork server")
            assert workers.keys() == {"fs:one/1#0", "fs:other/1#0"}
            assert write(port, "one") == write(port, "other") != ""
            threads = {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in workers.items()}
            assert threads["fs:one/1#0"] < threads["fs:other/1#0"]  # a step has used the two of `threads`

            for pid in (forks, *workers.values()):  # as a service manager does: it is the owner's to drain
                os.kill(pid, signal.SIGTERM)
            assert write(port, "one") == write(port, "other")

            os.kill(forks, signal.SIGKILL)
            until(lambda: "the fork server died, its workers go on" in log.read_text(), "it has ended")
            assert write(port, "one") == write(port, "other")
            os.kill(workers["fs:one/1#0"], signal.SIGKILL)
            until(lambda: "worker 0 is ready again" in log.read_text(), "it is forked again")
            assert write(port, "one") == write(port, "other")
            assert log.read_text().count(IMPORTS) == 2  # by another

            handles = [os.pidfd_open(pid) for pid in proc.children_of(owner.pid)]
            assert len(handles) == 3
        finally:
            owner.kill()
    all_end(handles)
