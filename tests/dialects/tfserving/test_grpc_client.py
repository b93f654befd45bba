"""TensorFlow Serving's generated stubs, unmodified, in a process of their own, against a server's."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dialects.tfserving.grpc_rig import write_halves
from tests.running import Running

NO_STUBS = "tensorflow-serving-api is not installed: see tests/clients.txt"


@pytest.mark.skipif(importlib.util.find_spec("tensorflow_serving") is None, reason=NO_STUBS)
def test_every_rpc(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_halves(folder)
    with Running(folder, tmp_path / "log") as running:
        command = [sys.executable, "-m", "tests.dialects.tfserving.stubs_client", running.grpc]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == {
        "predict": [[[2.5], 123], [[3.0, 4.5], 123], [[3.5], 123]],
        "classify": [["", 3.0]],
        "regress": [3.0],
        "multi": ["classification_result", "regression_result"],
        "metadata": ["classify_x2_to_y3", "classify_x_to_y", "regress_x_to_y", "serving_default"],
        "status": [123],
        "reload": [
            "UNIMPLEMENTED",
            "Replacing the models is disabled. Start the server with '--admin-reload-config' to enable.",
        ],
    }
