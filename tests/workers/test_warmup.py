"""Files of warm-up samples: read inside the model's folder, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastserve.errors import ConfigError
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.workers.warmup import run_samples

DATA = np.arange(4, dtype=np.int32)


def run(folder: Path, name: str) -> list[Any]:
    """Return the inputs that a model of 4 int32 was run with."""
    ran: list[Any] = []
    spec = TensorSpec("x", DTYPES["int32"], (4,))
    backend: Any = SimpleNamespace(inputs={"x": spec}, run=ran.append)
    given = {"dims": [4], "data": "file", "file": str(folder / "warmup" / name)}
    run_samples(backend, [{"inputs": {"x": given}}], batching=False)
    return ran


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "warmup").mkdir(parents=True)
    (made / "data").write_bytes(DATA.tobytes())
    (made / "warmup" / "data").write_bytes(DATA.tobytes())
    (made / "warmup" / "linked").symlink_to("../data")
    (made / "warmup" / "long").write_bytes(bytes(17))
    (made / "warmup" / "short").write_bytes(bytes(15))
    (made / "warmup" / "away").symlink_to("/etc/passwd")
    (made / "warmup" / "zero").symlink_to("/dev/zero")
    os.mkfifo(made / "warmup" / "pipe")
    return made


@pytest.mark.parametrize("name", ["data", "linked"])
def test_a_file_of_the_model(folder: Path, name: str) -> None:
    (ran,) = run(folder, name)
    assert ran["x"].tolist() == DATA.tolist()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("away", "leads out of its folder"),
        ("zero", "leads out of its folder"),
        ("pipe", "not a regular file"),
        ("none", "No such file or directory"),
        ("long", "larger than 16 bytes"),
        ("short", "has 15 bytes, not 16"),
        ("..", "leads out of its folder"),
    ],
)
def test_a_file_that_is_not(folder: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(folder, name)
