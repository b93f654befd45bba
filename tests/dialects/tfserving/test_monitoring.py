"""TensorFlow Serving's metrics page of a whole server (spec 6.5): what is counted under which names, and that
no counter falls."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from fastserve.settings import ModelEntry, TFServingOptions
from tests.dialects.tfserving.grpc_rig import PREDICTION, TfsServed, rows_of, serving
from tests.dialects.tfserving.test_warmup import both, classify, logs, predict, write
from tests.server.rig import run, write_model

NAMES = ":tensorflow:serving:"
SESSION = NAMES + "batching_session:"
PAGE = "/monitoring/prometheus/metrics"


async def samples(served: TfsServed) -> dict[str, float]:
    """The page without buckets, by name and labels."""
    status, body = await (await served.client()).get(PAGE)
    assert status == 200
    lines = [line for line in body.decode().splitlines() if line[0] != "#" and "_bucket{" not in line]
    return {line.rpartition(" ")[0].removeprefix(NAMES): float(line.rpartition(" ")[2]) for line in lines}


def test_requests_and_what_ran(tmp_path: Path) -> None:
    """MultiInference is no request in the original's counts, and has counts of its own."""
    write(tmp_path, None)
    monitored = TFServingOptions(monitoring=True)

    async def work() -> None:
        async with serving(tmp_path, tfserving=monitored) as served:
            client = await served.client()
            for _ in range(2):  # by the general path and by the fast one
                assert (await client.post("/v1/models/m:predict", b'{"instances": [{"x": [1, 2]}]}'))[
                    0
                ] == 200
                request = predict(1).predict_log.request
                request.model_spec.name = "m"
                await served.ask(PREDICTION + "Predict", request, "PredictResponse")
            request = classify(1).classify_log.request
            request.model_spec.name = "m"
            await served.ask(PREDICTION + "Classify", request, "ClassificationResponse")
            several = both(1, 2, 3).multi_inference_log.request
            await served.ask(PREDICTION + "MultiInference", several, "MultiInferenceResponse")
            several.tasks[0].model_spec.signature_name = "none"
            with pytest.raises(grpc.aio.AioRpcError):
                await served.ask(PREDICTION + "MultiInference", several, "MultiInferenceResponse")
            told = await samples(served)
            runs = {name: value for name, value in told.items() if name.startswith("runtime_latency")}
            assert {name: value for name, value in runs.items() if "_count{" in name} == {
                f'runtime_latency_count{{model_name="m",API="{api}",runtime="TF1"}}': count
                for api, count in (("Classify", 1), ("MultiInference", 1), ("Predict", 4))
            }
            for name, took in (("Predict", "predict"), ("Classify", "Classify")):
                ran = runs[f'runtime_latency_sum{{model_name="m",API="{name}",runtime="TF1"}}']
                sums = [
                    value for key, value in told.items() if f'latency_sum{{model_name="m",API="{took}"' in key
                ]
                assert ran > 0
                assert sums
            assert {name: value for name, value in told.items() if "example" in name} == {
                'request_example_counts_sum{model="m"}': 3,
                'request_example_counts_count{model="m"}': 1,
                'request_example_count_total{model="m"}': 3,
            }
            assert {name: value for name, value in told.items() if name.startswith("request_count")} == {
                'request_count{model_name="m",status="OK"}': 5
            }

    run(work())


@pytest.mark.parametrize("frontends", [1, 3])
def test_warm_up_records(tmp_path: Path, frontends: int) -> None:
    version = write(tmp_path, logs(predict(1, 2), both(3)))
    broken = write(tmp_path / "other", logs(predict(1)) + b"short")
    entries = (ModelEntry("m", str(version.parent)), ModelEntry("broken", str(broken.parent)))
    settings = {
        "models": entries,
        "model_control": "poll",
        "load_models": (),
        "load_retries": 0,
        "keep_going": True,
        "frontends": frontends,
    }

    async def work() -> None:
        async with serving(tmp_path, tfserving=TFServingOptions(monitoring=True), **settings) as served:
            pages = [await samples(served) for _ in range(frontends)]  # of as many front processes
            told, *others = [
                {name: value for name, value in page.items() if "warmup" in name} for page in pages
            ]
            assert others == [told] * (frontends - 1)
            good, bad = (
                f'{{model_path="{version}",status="OK"}}',
                f'{{model_path="{broken}",status="DATA_LOSS"}}',
            )
            assert told.pop("model_warmup_latency_sum" + good) > 0
            assert told.pop("model_warmup_latency_sum" + bad) > 0
            assert told == {
                "model_warmup_latency_count" + good: 1,
                "model_warmup_latency_count" + bad: 1,
                "model_warmup_records_read" + good: 2,
                "model_warmup_records_read" + bad: 1,
            }

    run(work())


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "moving-from-tensorflow-serving.md").read_text()
    spec = ["request_count", "request_latency", "runtime_latency", "request_example_counts"]
    spec += ["request_example_count_total", "model_warmup_latency", "model_warmup_records_read"]
    spec += [f"batching_session:{name}" for name in ("queuing_latency", "wrapped_run_count", "padding_size")]
    spec += ["batching_session:processed_batch_size"]
    assert [name for name in spec if f"| `{NAMES}{name}` |" not in page] == []
    assert "`input_batch_size`" in page


@pytest.mark.parametrize("frontends", [1, 3])
def test_batches_are_told_and_outlive_their_version(tmp_path: Path, frontends: int) -> None:
    write_model(tmp_path, allowed_batch_sizes=[2, 4])
    settings = {"tfserving": TFServingOptions(monitoring=True), "frontends": frontends}

    async def work() -> None:
        async with serving(tmp_path, **settings) as served:
            client = await served.client()

            async def page() -> str:
                status, body = await (await served.client()).get(PAGE)
                assert status == 200
                return body.decode()

            assert await page() == "\n"
            for rows in ((3, 4, 5), (6,)):
                await served.ask(PREDICTION + "Predict", rows_of(*rows), "PredictResponse")
            await served.until(served.is_clean)
            told = await page()
            samples = [
                "wrapped_run_count{} 2",
                'queuing_latency_bucket{thread_pool_name="batch_threads",le="+Inf"} 2',
                'processed_batch_size_bucket{le="2"} 0',
                'processed_batch_size_bucket{le="4"} 1',
                'processed_batch_size_bucket{le="8"} 2',
                "processed_batch_size_sum{} 6",
                'padding_size_sum{execution_batch_size="2"} 1',
                'padding_size_sum{execution_batch_size="4"} 1',
            ]
            for sample in samples:
                assert f"\n{SESSION}{sample}\n" in told, told
            assert told.endswith("\n")
            assert not told.endswith("\n\n")
            assert (await client.post("/v2/repository/models/twice/unload", b""))[0] == 200
            assert f"\n{SESSION}wrapped_run_count{{}} 2\n" in await page()

    run(work())
