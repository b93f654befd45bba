"""TensorFlow Serving over gRPC from two front processes: each predicts, and each may replace the models."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.dialects.tfserving.grpc_rig import MODELS, PREDICTION, TFS, rows_of
from tests.running import WAIT_S, Running, until
from tests.server.rig import write_model

pytestmark = pytest.mark.lingers  # grpcio keeps its threads
CHANNELS = 8  # 1 of 128 times the kernel gives them all to one front


def predict(channel: grpc.Channel, model: str, row: float) -> float:
    call = channel.unary_unary(PREDICTION + "Predict", response_deserializer=TFS.PredictResponse.FromString)
    request = rows_of(row, model=model)
    reply: Any = call(request.SerializeToString(), timeout=WAIT_S, wait_for_ready=True)
    return float(reply.outputs["y"].float_val[0])


def is_served(channel: grpc.Channel, model: str) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return predict(channel, model, 3) == 6
    return False


def test_both_predict_and_replace_the_models(tmp_path: Path) -> None:
    folders = {name: write_model(tmp_path / "elsewhere", name) for name in ("a", "b")}
    (tmp_path / "models").mkdir()
    write_model(tmp_path / "models")
    options = ("--frontends", "2", "--admin-reload-config")
    with Running(tmp_path / "models", tmp_path / "log", *options) as served:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(served.grpc, options=own) for _ in range(CHANNELS)]
        for channel in channels:
            for row in (1, 2, 3):  # the first of a front is learned from
                assert predict(channel, "twice", row) == 2 * row
        for number, channel in enumerate(channels):
            name, other = ("a", "b") if number % 2 else ("b", "a")
            request = TFS.ReloadConfigRequest()
            request.config.model_config_list.config.add(
                name=name, base_path=str(folders[name]), model_platform="tensorflow"
            )
            reload = channel.unary_unary(MODELS + "HandleReloadConfigRequest")
            reload(request.SerializeToString(), timeout=60)
            assert is_served(channel, name)  # at once where it was asked for
            for each in channels:
                until(lambda each=each, name=name: is_served(each, name), f"{name} is served by all")
                until(lambda each=each, other=other: not is_served(each, other), f"{other} is gone")
        for channel in channels:
            channel.close()
