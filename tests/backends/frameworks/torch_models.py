"""Small PyTorch models made here, in each of the forms that are served."""

from __future__ import annotations

import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

X = {"x": {"dtype": "float32", "shape": [4]}}
Y = {"y": {"dtype": "float32", "shape": [3]}}
CONFIG: dict[str, Any] = {"backend": "torch", "max_batch_size": 8, "inputs": X, "outputs": Y}


class Net(nn.Module):
    """[n, 4] -> [n, 3]"""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def net(seed: int = 7, hidden: int = 16) -> Net:
    torch.manual_seed(seed)
    return Net(hidden).eval()


def folder_of(root: Path, name: str = "net") -> Path:
    """NAME/1, made."""
    folder = root / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_script(root: Path, module: nn.Module, name: str = "net", file: str = "model.pt") -> Path:
    """As TorchScript; the version's folder."""
    folder = folder_of(root, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(folder / file))
    return folder


def save_program(root: Path, module: nn.Module, *inputs: Any, name: str = "net", rows: bool = True) -> Path:
    """As a torch.export program with a free first axis."""
    folder = folder_of(root, name)
    rows_of = torch.export.Dim("rows")
    shapes = torch.utils._pytree.tree_map(lambda _: {0: rows_of}, inputs) if rows else None
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    torch.export.save(program, str(folder / "model.pt2"))
    return folder


def save_class(root: Path, source: str, name: str = "net") -> Path:
    """As a model.py."""
    folder = folder_of(root, name)
    (folder / "model.py").write_text(textwrap.dedent(source))
    return folder
