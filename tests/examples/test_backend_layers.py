"""The example of docs/writing-a-backend.md, served from outside the package: rows, its errors, its load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from fastserve.errors import ConfigError, ServeError
from tests.server.rig import run, serving

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "backend_layers"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))  # of the workers


def write_layers(folder: Path, config: str, **arrays: np.ndarray) -> Path:
    version = folder / "models" / "net" / "1"
    version.mkdir(parents=True)
    (version.parent / "model.yaml").write_text(config)
    if arrays:
        np.savez(version / "layers.npz", **arrays)
    return folder / "models"


def guide_config() -> str:
    found = re.search(r"```yaml\n# models/net/model.yaml\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_it_is_served_as_the_page_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    w0, b0, w1, b1 = rng.normal(size=(4, 8)), rng.normal(size=8), rng.normal(size=(8, 3)), rng.normal(size=3)
    models = write_layers(tmp_path, guide_config(), w0=w0, b0=b0, w1=w1, b1=b1)
    rows = rng.normal(size=(5, 4))

    async def work() -> None:
        async with serving(models) as served:
            client = await served.client()
            body = json.dumps({"instances": rows.tolist()}).encode()
            status, said = await client.post("/v1/models/net:predict", body)
            assert status == 200
            expected = np.maximum(rows @ w0 + b0, 0) @ w1 + b1
            assert json.loads(said)["predictions"] == pytest.approx(expected.astype("f4"), rel=1e-4, abs=1e-5)
            status, said = await client.post("/v1/models/net:predict", b'{"instances": [[1e40, 0, 0, 0]]}')
            assert (status, json.loads(said)["error"]) == (400, "x must be finite")

    run(work())


@pytest.mark.parametrize(
    ("arrays", "batch", "words"),
    [
        ({}, 8, "layers.npz is missing"),
        ({"w0": np.ones((2, 3)), "b0": np.ones(2)}, 8, "layers.npz: given layers that do not fit"),
        ({"w0": np.ones((2, 3)), "weights": np.ones(2)}, 8, "layers.npz cannot be read"),
        ({"w0": np.ones((2, 3)), "b0": np.ones(3)}, 0, "max_batch_size: given 0"),
    ],
)
@pytest.mark.logs_errors
def test_a_load_that_fails_says_why(
    tmp_path: Path, arrays: dict[str, np.ndarray], batch: int, words: str
) -> None:
    config = yaml.safe_dump({**yaml.safe_load(guide_config()), "max_batch_size": batch})
    models = write_layers(tmp_path, config, **arrays)

    async def work() -> None:
        with pytest.raises((ServeError, ConfigError), match=re.escape(words)):
            async with serving(models):
                pass

    run(work())


def test_the_page_shows_the_example() -> None:
    source = (EXAMPLE / "layers.py").read_text()
    page = PAGE.partition("\n## A backend\n")[2]  # the blocks of capabilities.py have a test of their own
    blocks = re.findall(r"```python\n(?!# capabilities.py)(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for line in filter(str.strip, "".join(blocks).splitlines()):
        assert line.strip() in source, line
