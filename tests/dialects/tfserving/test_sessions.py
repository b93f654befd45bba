"""Batches on TensorFlow Serving's metrics page: what is counted, and that no counter falls."""

from __future__ import annotations

from pathlib import Path

from fastserve.config import TFServingOptions
from tests.dialects.tfserving.grpc_rig import PREDICTION, rows_of, serving
from tests.server.rig import run, write_model

SESSION = ":tensorflow:serving:batching_session:"


def test_batches_are_told_and_outlive_their_version(tmp_path: Path) -> None:
    write_model(tmp_path, allowed_batch_sizes=[2, 4])

    async def work() -> None:
        async with serving(tmp_path, tfserving=TFServingOptions(monitoring=True)) as served:
            client = await served.client()

            async def page() -> str:
                status, body = await client.get("/monitoring/prometheus/metrics")
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
