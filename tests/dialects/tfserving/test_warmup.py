"""Warm-up records: what is run before a version is available, how often, and what fails its load."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.codec.byte_formats import masked, read_records
from fastserve.dialects.tfserving import warmup
from fastserve.dialects.tfserving.warmup import FILE
from fastserve.errors import Kind, ServeError
from fastserve.server.server import dry_run
from fastserve.settings import Settings, TFServingOptions
from tests.dialects.tfserving.grpc_rig import TFS, fill, serving
from tests.server.rig import run

CONFIG: dict[str, Any] = {
    "backend": "python",
    "max_batch_size": 4,
    "inputs": {"x": {"dtype": "float32", "shape": [2]}},
    "outputs": {"y": {"dtype": "float32", "shape": [2]}, "total": {"dtype": "float32", "shape": []}},
    "signatures": {
        "classes": {"method": "classify", "inputs": {"pair": "x"}, "outputs": {"scores": "y"}},
        "sums": {"method": "regress", "inputs": {"pair": "x"}, "outputs": {"outputs": "total"}},
    },
    "warmup": "off",
}
# Every run leaves a line; a number under zero is one it cannot bear.
MODEL = """
from pathlib import Path
import numpy as np

LOG = Path(__file__).parent / "runs"

class Model:
    def __init__(self, config): pass

    def run(self, inputs):
        x = inputs["x"]
        with LOG.open("a") as log:
            log.write(f"{x.tolist()}\\n")
        if (x < 0).any():
            raise ValueError("a number under zero")
        return {"y": x, "total": x.sum(1, dtype=np.float32)}
"""
STRINGS = """
from pathlib import Path

class Model:
    def __init__(self, config): pass

    def run(self, inputs):
        (Path(__file__).parent / "runs").write_text(repr(inputs["s"].tolist()))
        return {"t": inputs["s"]}
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling { step {
    model_name: "m" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


def framed(records: Iterable[bytes]) -> bytes:
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, struct.pack("<I", masked(length)), record, struct.pack("<I", masked(record))]
    return b"".join(parts)


def predict(*rows: float, **spec: Any) -> Any:
    log = TFS.PredictionLog()
    request = log.predict_log.request
    request.model_spec.name = "whatever it was called there"
    for name, value in spec.items():
        setattr(request.model_spec, name, value)
    fill(request.inputs["x"], 1, (len(rows), 2))
    request.inputs["x"].float_val.extend(value for row in rows for value in (row, 0.5))
    return log


def examples(given: Any, *rows: float) -> None:
    for row in rows:
        example = given.example_list.examples.add()
        example.features.feature["pair"].float_list.value.extend([row, 0.5])


def classify(*rows: float, signature: str = "classes") -> Any:
    log = TFS.PredictionLog()
    log.classify_log.request.model_spec.signature_name = signature
    examples(log.classify_log.request.input, *rows)
    return log


def regress(*rows: float) -> Any:
    log = TFS.PredictionLog()
    log.regress_log.request.model_spec.signature_name = "sums"
    examples(log.regress_log.request.input, *rows)
    return log


def both(*rows: float) -> Any:
    log = TFS.PredictionLog()
    request = log.multi_inference_log.request
    for name, verb in (("classes", "classify"), ("sums", "regress")):
        task = request.tasks.add(method_name=f"tensorflow/serving/{verb}")
        task.model_spec.name, task.model_spec.signature_name = "m", name
    examples(request.input, *rows)
    return log


def write(root: Path, data: bytes | None, code: str = MODEL, **changes: Any) -> Path:
    version = root / "m" / "1"
    (version / "assets.extra").mkdir(parents=True)
    (version / "model.py").write_text(code)
    (root / "m" / "model.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    if data is not None:
        (version / FILE).write_bytes(data)
    return version


def write_ensemble(root: Path, data: bytes) -> Path:
    """`ens` is `m` by another name, with the records; the folder of `m`'s version, which says what ran."""
    version, own = write(root, None), root / "ens" / "1"
    (own / "assets.extra").mkdir(parents=True)
    (own / FILE).write_bytes(data)
    (root / "ens" / "config.pbtxt").write_text(ENSEMBLE)
    return version


def logs(*given: Any) -> bytes:
    return framed(log.SerializeToString() for log in given)


def tried(root: Path, model: str = "m", **options: Any) -> list[str]:
    settings = Settings(repository=str(root), tfserving=TFServingOptions(**options))
    return dry_run(settings).problems.get(model, [])


def runs(version: Path) -> list[list[list[float]]]:
    log = version / "runs"
    return [yaml.safe_load(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_every_kind_of_log_is_run(tmp_path: Path) -> None:
    version = write(tmp_path, logs(predict(1, 2), classify(3), regress(4, 5), both(6)))
    assert tried(tmp_path) == []
    assert [[row[0] for row in batch] for batch in runs(version)] == [[1, 2], [3], [4, 5], [6], [6]]


def test_as_often_as_asked_and_never_more_rows_than_a_batch_has(tmp_path: Path) -> None:
    version = write(tmp_path, logs(predict(*range(6))))
    assert tried(tmp_path, warmup_times=3) == []
    assert [len(batch) for batch in runs(version)] == [4, 2] * 3


@pytest.mark.parametrize(
    ("data", "options"), [(None, {}), (b"", {}), (logs(predict(-1)), {"warmup_records": False})]
)
def test_nothing_is_run(tmp_path: Path, data: bytes | None, options: dict[str, Any]) -> None:
    version = write(tmp_path, data)
    assert tried(tmp_path, **options) == []
    assert runs(version) == []


def test_strings(tmp_path: Path) -> None:
    log = TFS.PredictionLog()
    log.predict_log.request.model_spec.signature_name = ""
    fill(log.predict_log.request.inputs["s"], 7, (2,))
    log.predict_log.request.inputs["s"].string_val.extend([b"", b"\xffab"])
    strings = {
        "inputs": {"s": {"dtype": "bytes", "shape": []}},
        "outputs": {"t": {"dtype": "bytes", "shape": []}},
    }
    version = write(tmp_path, logs(log), STRINGS, **strings, signatures={})
    assert tried(tmp_path) == []
    assert (version / "runs").read_text() == repr([b"", b"\xffab"])


def wrong_type() -> Any:
    log = predict(1)
    log.predict_log.request.inputs["x"].dtype = 2
    return log


FAULTS: dict[str, tuple[Any, str]] = {
    "runs and fails": (predict(-1), "record 1: ValueError: a number under zero"),
    "no such signature": (
        predict(1, signature_name="none"),
        'record 1: Serving signature key "none" not found.',
    ),
    "not that dtype": (wrong_type(), "record 1: Expects arg[0] to be float but double is provided"),
    "no example": (classify(), "record 1: Input is empty."),
    "no classifier": (classify(1, signature="sums"), "record 1: Expected classification signature outputs"),
    "of a session": (
        TFS.PredictionLog(session_run_log=b"x"),
        "record 1: Unsupported log_type for warmup: session_run",
    ),
    "of nothing": (TFS.PredictionLog(), "record 1: Unsupported log_type for warmup: LOG_TYPE_NOT_SET"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_record_that_fails_fails_the_load(tmp_path: Path, name: str) -> None:
    log, words = FAULTS[name]
    write(tmp_path, logs(predict(1), log))
    (told,) = tried(tmp_path)
    assert words in told
    assert str(tmp_path) not in told


def test_more_rows_than_the_model_takes(tmp_path: Path) -> None:
    write(tmp_path, logs(predict(*range(5))), split_large_requests=False)
    (told,) = tried(tmp_path)
    assert "record 0: Task size 5 is larger than maximum input batch size 4" in told


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not a TFRecord file", "corrupted record at 0"),
        (b"short", "truncated record at 0"),
        (logs(predict(1)) + b"\0", "truncated record at"),
        (logs(predict(1))[:-1], "truncated record at 0"),
        (logs(predict(1))[:-1] + b"\0", "corrupted record at 0"),
        (framed([b"x" * 9])[:12] + b"y" * 9 + framed([b"x" * 9])[-4:], "corrupted record at 0"),
    ],
)
def test_files_that_are_none(tmp_path: Path, data: bytes, words: str) -> None:
    write(tmp_path, data)
    (told,) = tried(tmp_path)
    assert words in told
    assert told.endswith(". Please verify your warmup data is in TFRecord format.")


def test_a_length_beyond_everything_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 62)
    (tmp_path / "frames").write_bytes(length + struct.pack("<I", masked(length)) + b"x" * 100)
    with (
        (tmp_path / "frames").open("rb") as file,
        pytest.raises(ServeError, match="truncated record at 0") as fault,
    ):
        list(read_records(file))
    assert fault.value.kind is Kind.DATA_LOSS


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "frames").write_bytes(framed([b"a", b"b" * 100_000]))
    with (tmp_path / "frames").open("rb") as file:
        frames = read_records(file)
        assert next(frames) == b"a"
        os.truncate(tmp_path / "frames", 50_000)
        with pytest.raises(ServeError, match="truncated record at 17"):
            next(frames)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = write(tmp_path, framed([predict(1).SerializeToString()] * 1001))
    assert "Number of warmup records exceeds the maximum (1000)" in tried(tmp_path)[0]
    assert runs(version) == []
    with monkeypatch.context() as patch:
        patch.setattr(warmup, "FILE_BYTES", 100)
        assert "larger than 100 bytes" in tried(tmp_path)[0]
    (version / FILE).write_bytes(framed([b"\xff\xff"]))
    assert "record 0: Failed to parse warmup record" in tried(tmp_path)[0]
    monkeypatch.setattr("fastserve.engine.loader.MOST_BYTES", 20)
    unread = framed([b"no log, and not looked at: records are taken one by one"])
    (version / FILE).write_bytes(logs(predict(1), predict(1, 2)) + unread)
    assert "record 1: recorded inputs are over the limit of 20 bytes" in tried(tmp_path)[0]


def test_a_link_that_leads_out(tmp_path: Path) -> None:
    version = write(tmp_path, None)
    (tmp_path / "elsewhere").write_bytes(logs(predict(1)))
    (version / FILE).symlink_to(tmp_path / "elsewhere")
    assert "leads out of its folder" in tried(tmp_path)[0]


def test_a_worker_that_comes_back_runs_them_too(tmp_path: Path) -> None:
    version = write(tmp_path, logs(predict(7)), restart_backoff_s=0.01)

    async def scene() -> None:
        async with serving(tmp_path) as served:
            assert runs(version) == [[[7, 0.5]]]
            (hosted,) = served.server.host.hosted.values()
            os.kill(hosted.group.pids[0], signal.SIGKILL)
            await served.until(lambda: hosted.group.restarts == 1)
            assert runs(version) == [[[7, 0.5]]] * 2

    run(scene())


def test_an_ensemble_runs_them_through_its_models(tmp_path: Path) -> None:
    """It has no workers: its models' run them, as often as asked."""
    version = write_ensemble(tmp_path, logs(predict(1, 2), predict(3)))
    assert tried(tmp_path, model="ens", warmup_times=2) == []
    assert [[row[0] for row in batch] for batch in runs(version)] == [[1, 2], [1, 2], [3], [3]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (logs(predict(1), predict(-1)), "record 1: in ensemble 'ens', ValueError: a number under zero"),
        (logs(predict(1), wrong_type()), "record 1: Expects arg[0] to be float but double is provided"),
        (b"short", "truncated record at 0"),
    ],
)
def test_an_ensemble_whose_records_fail_is_not_served(tmp_path: Path, data: bytes, words: str) -> None:
    write_ensemble(tmp_path, data)
    (told,) = tried(tmp_path, model="ens")
    assert words in told
    assert tried(tmp_path) == []


def test_nothing_is_left_of_an_ensemble_that_was_not_served(tmp_path: Path) -> None:
    write_ensemble(tmp_path, logs(predict(-1)))

    async def scene() -> None:
        async with serving(tmp_path, keep_going=True) as served:
            assert served.server.catalog.available("ens") is None
            assert served.server.host.ensembles == {}
            client = await served.client()
            assert (await client.post("/v1/models/m:predict", b'{"instances": [[1, 2]]}'))[0] == 200

    run(scene())
