"""torch.autocast as models are served with it, for real on the CPU: what forward computes in, and the types
of what comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.frameworks.test_torch import ROWS, expected, load
from tests.backends.frameworks.torch_models import net, save_class, save_program


@pytest.mark.parametrize("lower", ["bfloat16", "float16"])
@pytest.mark.parametrize("declared", ["float32", "float16", "bfloat16"])
def test_autocast_of_an_exported_program_gives_what_is_declared(
    tmp_path: Path, lower: str, declared: str
) -> None:
    """Also of a program whose own operations say their types; the config says the output's."""
    folder = save_program(tmp_path, net(), torch.zeros(2, 4))
    outputs = {"OUTPUT__0": {"dtype": declared, "shape": [3]}}
    backend = load(folder, torch={"autocast": lower}, outputs=outputs)
    y = backend.run({"x": ROWS})["OUTPUT__0"]
    assert y.dtype == (np.uint16 if declared == "bfloat16" else np.dtype(declared))
    found = torch.from_numpy(y)
    found = found.view(torch.bfloat16) if declared == "bfloat16" else found
    np.testing.assert_allclose(found.float().numpy(), expected(net(), ROWS), atol=0.03)


def test_autocast_is_around_forward_alone(tmp_path: Path) -> None:
    """Forward computes in the type that the option names; weights and inputs stay as they are."""
    source = """
        import torch
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 3)
            def forward(self, x):
                y = self.layer(x)
                kinds = (y.dtype, x.dtype, self.layer.weight.dtype)
                code = [(torch.float32, torch.bfloat16, torch.float16).index(kind) for kind in kinds]
                return torch.tensor(code, dtype=torch.float32).repeat(len(x), 1)
    """
    for option, code in (("off", 0), ("bfloat16", 1), ("float16", 2)):
        backend = load(save_class(tmp_path / option, source), torch={"autocast": option})
        assert backend.run({"x": ROWS})["y"][0].tolist() == [code, 0, 0]
