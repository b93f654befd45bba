"""A torch model behind a server as users run it: V2 over HTTP and gRPC, raw and JSON, against torch in this
process; a config.pbtxt with INPUT__0 by Triton's own clients; torch in the workers alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import yaml

from tests import proc
from tests.backends.frameworks.torch_models import CONFIG, net, save_program, save_script
from tests.running import Running

TRITON = """
platform: "pytorch_libtorch" max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
dynamic_batching { }
"""
ROWS = np.random.default_rng(5).standard_normal((6, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("torch")
    models = root / "models"
    save_script(models, net(), "script")
    save_script(models, net(), "triton")
    save_program(models, net(), torch.zeros(2, 4), name="program")
    (models / "script" / "model.yaml").write_text(yaml.safe_dump(CONFIG))
    (models / "program" / "model.yaml").write_text(yaml.safe_dump({"backend": "torch", "max_batch_size": 8}))
    (models / "triton" / "config.pbtxt").write_text(TRITON)
    with Running(models, root / "log", torch=True) as running:
        yield running


def wanted() -> np.ndarray:
    with torch.inference_mode():
        return net()(torch.from_numpy(ROWS)).numpy()


@pytest.mark.lingers  # the first client of gevent's opens a loop, for good
@pytest.mark.parametrize(
    ("model", "x", "y"),
    [("script", "x", "y"), ("program", "x", "OUTPUT__0"), ("triton", "INPUT__0", "OUTPUT__0")],
)
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("module", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_answers_are_torchs(served, model, x, y, binary, module):
    address = served.http if module is triton_http else served.grpc
    with module.InferenceServerClient(address) as client:
        given = module.InferInput(x, ROWS.shape, "FP32")
        if module is triton_http:
            given.set_data_from_numpy(ROWS, binary_data=binary)
            asked = module.InferRequestedOutput(y, binary_data=binary)
        else:
            given.set_data_from_numpy(ROWS)
            asked = module.InferRequestedOutput(y)
        found = client.infer(model, [given], outputs=[asked]).as_numpy(y)
    np.testing.assert_allclose(found, wanted(), rtol=1e-5, atol=1e-6)


def test_a_program_tells_clients_its_tensors(served):
    with triton_http.InferenceServerClient(served.http) as client:
        told = client.get_model_metadata("program")
        assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        assert told["outputs"] == [{"name": "OUTPUT__0", "datatype": "FP32", "shape": [-1, 3]}]
        assert client.get_model_config("triton")["backend"] == "pytorch"
        assert client.get_model_metadata("triton")["platform"] == "pytorch_libtorch"


def test_torch_is_in_the_workers_alone(tmp_path):
    """CUDA cannot be initialised where torch is not: no front, and nobody who forks, has it mapped."""
    folder = save_script(tmp_path / "models", net(), "script")
    (folder.parent / "model.yaml").write_text(yaml.safe_dump(CONFIG))
    with Running(tmp_path / "models", tmp_path / "log") as served:
        assert "libtorch" not in Path(f"/proc/{served.pid}/maps").read_text()
        workers = served.workers
        assert workers
        assert all("libtorch" in proc.read(pid, "maps") for pid in workers)


def test_a_model_that_cannot_be_opened_says_how_to_convert_it(tmp_path):
    folder = save_script(tmp_path / "models", net(), "weights")
    torch.save(net().state_dict(), folder / "model.pt")
    (folder.parent / "model.yaml").write_text(yaml.safe_dump(CONFIG))
    save_script(tmp_path / "models", net(), "script")
    (tmp_path / "models" / "script" / "model.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(
        AssertionError, match=r"weights: version 1: model\.pt is a pickle.*torch\.export\.save"
    ):
        Running(tmp_path / "models", tmp_path / "log", ends=1, torch=True).__enter__()
