"""The examples of models of rows: each trains, is served, and answers its own request as its library does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.running import Running

FOLDER = Path(__file__).parents[2] / "examples" / "tabular"
REQUEST = re.compile(r"curl http://127\.0\.0\.1:8000(\S+) -d '(.*)'")
NEEDS = {"sklearn": "skops", "catboost": "catboost"}


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_an_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, name))
    script = FOLDER / name / "train.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = REQUEST.search(script.read_text())
    assert found is not None
    path, body = found.groups()
    with Running(tmp_path / "models", tmp_path / "log") as server:
        request = urllib.request.Request(f"http://{server.http}{path}", body.encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            (said,) = json.load(reply)["predictions"]
    (wanted,) = json.loads(done.stdout)["predictions"]
    if isinstance(wanted, str):
        assert said == wanted
    else:
        np.testing.assert_allclose(said, wanted, rtol=1e-6)
