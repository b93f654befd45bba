"""TensorFlow Serving's Predict over gRPC beside V2's ModelInfer: one server, the same rows, in turns.

As in `grpc_load` the ratio is that of what a request costs the server in CPU time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import uvloop

from bench import workloads
from bench.load import grpc_load, table
from bench.load.grpc_load import TURN_SECONDS, Turns
from bench.load.measure import Plan
from fastserve.protos import load

TFS = load("tfserving")
PATH = "/tensorflow.serving.PredictionService/Predict"
# Part -> the model, whether values go as bytes, and the least ratio.
LEAST = {
    "tfs-grpc-tiny": ("tiny", False, 0.95),
    "tfs-grpc-mlp": ("mlp", False, 0.95),
    "tfs-grpc-image": ("image", False, 0.9),
    "tfs-grpc-content": ("image", True, 0.9),
}
PARTS = list(LEAST)


def make_request(model: str, content: bool) -> bytes:
    row = workloads.row(model)
    request = TFS.PredictRequest(model_spec={"name": model})
    tensor = request.inputs["x"]
    tensor.dtype = TFS.DataType.Value("DT_FLOAT")
    for size in (1, row.size):
        tensor.tensor_shape.dim.add(size=size)
    if content:
        tensor.tensor_content = row.astype("<f4").tobytes()
    else:
        tensor.float_val.extend(row.tolist())
    data: bytes = request.SerializeToString()
    return data


async def verify(port: int, model: str, message: bytes) -> None:
    """Raises AssertionError for a wrong answer, AioRpcError."""
    reply = await grpc_load.ask_until_loaded(port, PATH, message)
    (output,) = TFS.PredictResponse.FromString(reply).outputs.values()
    wanted = workloads.expected(model).ravel()
    assert len(output.float_val) == wanted.size
    assert all(abs(a - b) < 1e-4 * max(1, abs(b)) for a, b in zip(output.float_val, wanted, strict=True))


def row(part: str, plan: Plan) -> table.Row:
    """One line of the table; medians of all turns."""
    model, content, least = LEAST[part]
    ours, theirs = make_request(model, content), grpc_load.make_request(model)
    with grpc_load.subject(model, [plan.server_core]) as server:
        asyncio.run(grpc_load.verify(server, model, theirs))
        uvloop.run(verify(server.port, model, ours))
        base, found = Turns(server), Turns(server)
        for turn in range(max(1, round(plan.repeats * plan.seconds / TURN_SECONDS))):
            base.take(theirs, plan.load_core)
            found.take(ours, plan.load_core, PATH)
            plan.say(f"{part}: {turn + 1}  {base.rates[-1]:,.0f}/s {found.rates[-1]:,.0f}/s")
    return _write(part, least, (base, found))


def _write(part: str, least: float, taken: Sequence[Turns]) -> table.Row:
    rates = [statistics.median(turns.rates) for turns in taken]
    costs = [statistics.median(turns.costs_us) for turns in taken]
    note = f"CPU {costs[0]:,.1f} and {costs[1]:,.1f} us a request, that of rates {rates[1] / rates[0]:.2f}"
    ratio = costs[0] / costs[1]
    return table.Row(part, f"{rates[0]:,.0f}/s", f"{rates[1]:,.0f}/s", ratio, least, note=note)
