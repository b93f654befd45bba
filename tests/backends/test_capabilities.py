"""The capabilities a backend may declare: the examples of docs/writing-a-backend.md, each run by a worker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.backends import base
from fastserve.errors import ConfigError
from tests.server.rig import run, serving
from tests.workers.device_rig import device_pair
from tests.workers.pair import pair

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text()
SOURCE = "\n\n".join(re.findall(r"```python\n# capabilities.py\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, "docs/writing-a-backend.md", "exec"), namespace)
    return namespace


def made(page: dict[str, Any], name: str) -> Any:
    backend = page[name]({}, Path(), 0)
    backend.load()
    base.check_capabilities(backend)
    return backend


def test_capabilities_are_found_by_their_members_alone(page: dict[str, Any]) -> None:
    found = {
        name: [
            capability.removeprefix("Supports")
            for capability in vars(base)
            if capability.startswith("Supports") and isinstance(made(page, name), getattr(base, capability))
        ]
        for name in ("Doubles", "Statistics", "Joined", "Bound", "OnDevice", "Cached")
    }
    assert found == {
        "Doubles": [],
        "Statistics": ["Signatures"],
        "Joined": ["RequestJoining"],
        "Bound": ["OutputBinding"],
        "OnDevice": ["Device", "ComputeStream"],
        "Cached": ["MemoryRelease"],
    }
    told = [name for name in vars(base) if name.startswith("Supports")]
    assert [name for name in told if f"| `{name}` |" not in PAGE] == []


def test_signatures_of_a_backend_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capabilities.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the workers
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "model.yaml").write_text("backend: capabilities:Statistics\n")

    async def work() -> None:
        async with serving(tmp_path / "models") as served:
            client = await served.client()
            for request, answer in [
                ({"instances": [[1, 2], [3, 4]]}, [[2.0, 4.0], [6.0, 8.0]]),
                ({"signature_name": "mean", "instances": [[1, 2, 6]]}, [3.0]),
            ]:
                status, said = await client.post("/v1/models/m:predict", json.dumps(request).encode())
                assert (status, json.loads(said)) == (200, {"predictions": answer})

    run(work())


def test_requests_of_different_shapes_reach_run_requests_in_one_batch(page: dict[str, Any]) -> None:
    backend = made(page, "Joined")
    counts: list[int] = []
    run_requests = backend.run_requests
    backend.run_requests = lambda requests: counts.append(len(requests)) or run_requests(requests)
    with pair(backend) as at:
        sent = [np.ones((1, 3), "f4"), np.full((2, 2), 2, "f4")]
        places = [at.put(x=array) for array in sent]
        at.step()
        for place, array in zip(places, sent, strict=True):
            np.testing.assert_array_equal(at.get(*place)["y"], 2 * array)
    assert counts == [2]


def test_run_into_fills_the_outputs_of_the_arena(page: dict[str, Any]) -> None:
    backend = made(page, "Bound")
    backend.run = None  # nothing else is called
    with pair(backend) as at:
        place = at.put(x=np.array([[1, 2], [3, 4]], "f4"))
        at.step()
        assert at.get(*place)["y"].tolist() == [[2, 4], [6, 8]]


def test_run_on_device_gets_tensors(page: dict[str, Any]) -> None:
    backend = made(page, "OnDevice")
    backend.run = None
    with device_pair(backend) as at:
        place = at.put(x=np.array([[1, 2], [3, 4]], "f4"))
        at.take()
        at.finish()
        assert at.get(*place)["y"].tolist() == [[2, 4], [6, 8]]


@pytest.mark.lingers
def test_release_memory_is_called_before_a_batch_is_run_in_parts(page: dict[str, Any]) -> None:
    backend = made(page, "Cached")
    backend.cached = 4
    with pair(backend) as at:
        place = at.put(x=np.array([[1, 2], [3, 4]], "f4"))
        at.step()
        assert at.get(*place)["y"].tolist() == [[2, 4], [6, 8]]


@pytest.mark.parametrize(
    ("switch", "members"),
    [
        ("joins_requests", "ragged_inputs and run_requests"),
        ("binds_outputs", "run_into"),
        ("takes_device_tensors", "run_on_device"),
    ],
)
def test_a_switch_without_its_methods_fails_the_load(
    page: dict[str, Any], switch: str, members: str, tmp_path: Path
) -> None:
    kind = type("Half", (page["Doubles"],), {switch: True})
    backend = kind({}, tmp_path, 0)
    with pytest.raises(ConfigError, match=f"^backend Half has {switch} and no {members}$"):
        base.check_capabilities(backend)
    setattr(backend, switch, False)
    base.check_capabilities(backend)
