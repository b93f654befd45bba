"""`fastserve mindie`: a config.json served in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.running import free_port, run_command

RIG = Path("tests/text/rigs/llm-limits/m1").absolute()


def test_its_models_on_its_ports(tmp_path: Path) -> None:
    port, management = free_port(), free_port()
    model = {"modelName": "m1", "modelWeightPath": str(RIG), "worldSize": 4}
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "ServerConfig": {
                    "port": port,
                    "managementPort": management,
                    "metricsPort": management,
                    "managementIpAddress": "127.0.0.1",
                    "httpsEnabled": False,
                },
                "BackendConfig": {"ModelDeployConfig": {"ModelConfig": [model]}},
            }
        )
    )
    command = [sys.executable, "-m", "fastserve.cli", "mindie", str(file), "--drain-delay-s", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert b"ready" in server.stdout.readline()
            body = json.dumps({"inputs": "a"}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/infer", body, 60) as reply:
                assert json.load(reply) == {"generated_text": "xxxxxx"}
            with urllib.request.urlopen(f"http://127.0.0.1:{management}/metrics", None, 60) as reply:
                assert b'generation_tokens_total{model_name="m1"} 6' in reply.read()
        finally:
            server.send_signal(signal.SIGTERM)
            err = server.communicate(timeout=120)[1]
    assert server.returncode == 0
    assert b"ignored: BackendConfig.ModelDeployConfig.ModelConfig[0].worldSize of config.json" in err


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run_command("mindie", str(tmp_path / "config.json"))
    assert done.returncode == 1
    assert (
        done.stderr
        == "Error: config.json: BackendConfig: missing, write BackendConfig: with a mapping of fields "
        + ("ModelDeployConfig, ScheduleConfig, modelInstanceNumber, multiNodesInferEnabled\n")
    )
