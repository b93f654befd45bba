"""CUDA graphs where several threads of a process would make them; torch's calls are stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastserve.backends import create
from fastserve.backends.frameworks import torch as torch_run
from fastserve.backends.frameworks.torch_tensors import CAPTURING
from fastserve.repository.model_config import config_json, parse_model_config
from tests.backends.frameworks.torch_models import CONFIG, net, save_script


def test_graphs_of_one_process_are_captured_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that began to would synchronise the device, which ends a capture. Replays go on."""
    held: list[tuple[str, bool]] = []

    class Graph:
        def __init__(self) -> None:
            held.append(("made", CAPTURING.locked()))

        def replay(self) -> None:
            held.append(("replayed", CAPTURING.locked()))

        def pool(self) -> int:
            return 1

    @contextlib.contextmanager
    def capture(graph: Graph, **more: Any) -> Iterator[None]:
        assert more["capture_error_mode"] == "thread_local"
        held.append(("captured", CAPTURING.locked()))
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    config = config_json(parse_model_config(CONFIG))
    backend = create(config, save_script(tmp_path, net()), 0)
    backend.load()
    graphs = torch_run._Graphs(backend._call, [2, 4], backend, torch.inference_mode)
    assert graphs({"x": torch.zeros(2, 4)})["y"].shape == (2, 3)
    assert held == [("made", True), ("captured", True)] * 2 + [("replayed", False)]
