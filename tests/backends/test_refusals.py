"""Models that are refused by their folder alone, before a framework is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOAD = """
import sys
from pathlib import Path
from fastserve.backends import create
try:
    create(%r, Path(sys.argv[1]), 0).load()
except Exception as error:
    print(error)
print([name for name in ("torch", "transformers", "tensorflow", "onnxruntime") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"backend": "text"}, {"config.json": {"model_type": "mamba"}}, "model_type"),
        ({"backend": "text"}, {"config.json": {"model_type": "gpt2"}}, "no file model.safetensors"),
        ({"backend": "torch"}, {}, "no file model.pt2 or model.pt"),
        ({"backend": "torch"}, {"model.pt": "text"}, "model.pt is no PyTorch program"),
        ({"backend": "onnx"}, {}, "no file model.onnx"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_before_frameworks_are_imported(
    tmp_path: Path, config: dict[str, str], files: dict[str, object], words: str
) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    run = [sys.executable, "-c", LOAD % ({"name": "m", **config},), str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    told, imported = done.stdout.splitlines()
    assert words in told
    assert imported == "[]"
