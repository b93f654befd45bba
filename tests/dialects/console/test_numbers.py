"""The rows and the details that the page reads, of counters and versions made here."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve.dialects.admin import history as history_module
from fastserve.dialects.admin.console import NEAR, SharedReplies, last_of
from fastserve.dialects.admin.figures import ModelFigures
from fastserve.dialects.admin.history import History, work_on
from fastserve.dialects.admin.numbers import ModelDetails, NumbersReader, find_trouble
from fastserve.dialects.admin.openapi import Examples
from fastserve.metrics import LoadFailure, ModelReadiness, Readiness, Registry, names
from fastserve.metrics.names import Traffic
from fastserve.metrics.registry import (
    FAILED_MODELS,
    LAST_FAILURES,
    LAST_REFUSALS,
    FailedRequest,
    FailedRequests,
)
from fastserve.repository.catalog import Catalog
from fastserve.repository.model_config import ModelConfig
from fastserve.repository.version import Version, VersionState
from fastserve.serving.dialect import ServingContext
from fastserve.settings import Settings
from fastserve.settings.kserve_options import TritonOptions
from fastserve.tensor import DTYPES, TensorSpec

SECOND = 1_000_000_000
PAGE = Path(history_module.__file__).parent / "page"


class Site:
    """A front process' counters and catalog, without a server."""

    def __init__(self, triton: TritonOptions | None = None) -> None:
        self.registry, self.catalog, self.readiness = Registry(), Catalog(), Readiness(True, "")
        self.traffic = Traffic(self.registry, "kserve_v2", self.catalog.models)
        self.history = History(self.registry)
        context: Any = SimpleNamespace(
            registry=self.registry,
            engine=SimpleNamespace(catalog=self.catalog, text_info=lambda version: None),
            readiness=self.readiness,
            repository=SimpleNamespace(explicit=True),
            started_ns=time.monotonic_ns(),
            settings=Settings(triton=triton or TritonOptions()),
        )
        self.reader = NumbersReader(_as_context(context), self.history)
        self.now_ns = 0

    def serve(self, name: str, workers: int = 1) -> Version:
        version = Version(name, 3, Path(), ModelConfig(backend="onnx", max_batch_size=8))
        version.inputs = {"x": TensorSpec("x", DTYPES["float32"], (2, -1))}
        version.outputs = {"y": TensorSpec("y", DTYPES["bytes"], None)}
        self.catalog.put(version)
        self.catalog.move(version, VersionState.LOADING)
        self.catalog.move(version, VersionState.AVAILABLE)
        self.readiness.models[name] = ModelReadiness(True)
        for metric in (names.WORKERS_ALIVE, names.WORKERS_WANTED):
            self.registry.gauges(metric).of(name, 3).set(workers)
        return version

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_ns += 2 * SECOND
            self.history.look(self.now_ns)

    def details(self, name: str) -> ModelDetails | None:
        return self.reader.details(name, 0, Examples(Settings(), ()))

    def rows(self, after: int = 0) -> Any:
        *_, body = self.reader.rows(after)
        return json.loads(body)


def _as_context(context: ServingContext) -> ServingContext:
    return context


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.registry.close()
    vars(found).clear()  # a meter in use keeps the registry's memory


def test_a_row_has_what_is_not_zero_and_the_points_asked_for(site: Site) -> None:
    site.serve("busy")
    site.serve("idle")
    site.look()
    for _ in range(6):
        site.traffic.count("busy", 3, 1_000_000)
    site.look(2)
    found = site.rows()
    busy, idle = found["models"]
    assert (found["first_point"], found["next_point"], found["may_load"]) == (0, 2, True)
    assert busy["now"] == {"requests_per_s": 1.5, "p50_ms": 0.75, "p99_ms": 0.995}
    assert busy["points"] == {
        "requests_per_s": [3.0, 0.0],
        "errors_per_s": [0.0, 0.0],
        "p99_ms": [0.995, None],
    }
    assert idle == {"model": "idle", "versions": [3], "now": {}}
    assert site.rows(after=1)["models"][0]["points"]["requests_per_s"] == [0.0]
    assert site.rows(after=2)["models"][0]["points"]["requests_per_s"] == []


def test_errors_of_clients_are_no_faults_of_the_model(site: Site) -> None:
    site.serve("m")
    site.look()
    site.traffic.count("m", 3, 1000)
    for kind in ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "INTERNAL"):
        site.traffic.refused("m", kind, 3, message=f"<b>{kind}", exchange=SimpleNamespace(request_id="r"))
    site.look()
    (row,) = site.rows()["models"]
    assert (row["now"]["errors_per_s"], row["now"]["faults_per_s"]) == (1.5, 0.5)
    assert (row["trouble"], row["why"]) == ("warn", "some requests fail")
    assert row["last"]["message"] == "<b>INTERNAL"
    details = site.details("m")
    assert details is not None
    assert [one.status for one in details.failures] == ["INTERNAL"]
    assert [one.status for one in details.refusals] == ["INVALID_ARGUMENT"] * 2
    assert {(cause.cause, cause.total) for cause in details.causes} == {
        ("INTERNAL", 1),
        ("INVALID_ARGUMENT", 2),
    }


def figures(requests: float = 0.0, faults: float = 0.0) -> ModelFigures:
    return ModelFigures(
        requests_per_s=requests, errors_per_s=faults, faults_per_s=faults, rows_per_s=0.0, p50_ms=None,
        p90_ms=None, p99_ms=None, batch_rows=None, queue_rows=0.0,
    )  # fmt: skip


READY = ModelReadiness(True)
FAILED = ModelReadiness(True, failed=LoadFailure(1.0, "1970-01-01T00:00:01Z", "no such file"))


@pytest.mark.parametrize(
    ("state", "readiness", "now", "workers", "found"),
    [
        ("ready", READY, figures(), (1, 1), ("", "")),
        ("ready", READY, figures(10.0, 0.1), (1, 1), ("warn", "some requests fail")),
        ("ready", READY, figures(10.0, 5.0), (1, 1), ("bad", "most requests fail")),
        ("ready", READY, figures(), (1, 2), ("warn", "1 of 2 workers")),
        (
            "down",
            ModelReadiness(False, "no worker is alive"),
            figures(),
            (0, 1),
            ("bad", "no worker is alive"),
        ),
        ("loading", ModelReadiness(False, "loading"), figures(), (0, 0), ("warn", "loading")),
        ("unloaded", None, figures(), (0, 0), ("", "")),
        (
            *("ready", FAILED, figures(), (1, 1)),
            ("warn", "a change failed to load since 1970-01-01T00:00:01Z: no such file"),
        ),
    ],
)
def test_trouble_is_what_an_operator_would_call_it(
    state: str, readiness: Any, now: ModelFigures, workers: tuple[int, int], found: tuple[str, str]
) -> None:
    assert find_trouble(state, readiness, now, workers) == found


def test_details_have_tensors_and_workers(site: Site) -> None:
    site.serve("a/<b>", workers=2)
    site.registry.gauges(names.WORKER_MEMORY).of("a/<b>", 3, 1).set(5e6)
    site.look(2)
    found = site.details("a/<b>")
    assert found is not None
    (version,) = found.versions
    assert [(one.device, one.memory_bytes) for one in version.workers] == [("cpu", None), ("cpu", 5_000_000)]
    assert [(one.name, one.datatype, one.shape) for one in found.inputs] == [("x", "FP32", [-1, 2, -1])]
    assert [(one.name, one.datatype, one.shape) for one in found.outputs] == [("y", "BYTES", None)]
    assert found.examples == []
    assert site.details("nobody") is None


def test_tensors_are_not_shown_where_metadata_wants_a_secret() -> None:
    site = Site(TritonOptions(http_restricted_api=("metadata:key=secret",)))
    site.serve("m")
    found = site.details("m")
    assert found is not None
    assert (found.inputs, found.outputs, found.examples, found.backend) == ([], [], [], "")
    assert found.versions[0].version == 3
    site.registry.close()
    vars(site).clear()


def test_a_version_that_ended_is_no_trouble_and_has_no_request(site: Site) -> None:
    version = site.serve("m")
    site.catalog.move(version, VersionState.UNLOADING)
    site.catalog.move(version, VersionState.END)
    del site.readiness.models["m"]
    site.look(2)
    assert site.rows()["models"] == [{"model": "m", "state": "unloaded", "now": {}}]
    found = site.details("m")
    assert found is not None
    assert (found.examples, found.inputs, found.versions[0].workers) == ([], [], [])


def test_a_reply_of_rows_is_made_once_for_all_pages(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.serve("m")
    site.look(NEAR + 4)
    made: list[int] = []
    rows = site.reader.rows
    monkeypatch.setattr(site.reader, "rows", lambda after: made.append(after) or rows(after))

    async def main() -> None:
        replies = SharedReplies(site.reader, site.history)
        seen = site.history.seen
        await asyncio.gather(*(replies.ask(seen - 1) for _ in range(5)))
        for after in (seen, seen + 1, 10**14, *range(seen)):
            await replies.ask(after)
        assert sorted(made) == [0, *range(seen - NEAR, seen + 1)]
        site.look()
        assert json.loads(await replies.ask(seen))["next_point"] == seen + 1
        replies.close()

    asyncio.run(main())


def test_one_who_leaves_does_not_take_the_reply_from_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        site.serve(f"m{number}")
    site.look(2)
    monkeypatch.setattr(history_module, "SLICE_NS", 0)

    async def main() -> None:
        replies = SharedReplies(site.reader, site.history)
        one, other = (asyncio.ensure_future(replies.ask(0)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        assert len(json.loads(await other)["models"]) == 20
        replies.close()

    asyncio.run(main())


def test_samples_and_replies_give_the_loop_back_between_models(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "SLICE_NS", 0)
    for number in range(64):
        site.serve(f"m{number:02}")
        site.traffic.count(f"m{number:02}", 3, 1000)
    site.look()
    steps, slices = site.history.steps(site.now_ns + SECOND), 1
    while work_on(steps):
        slices += 1
    assert slices > 64 // history_module.MODELS_A_STEP
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        counting = asyncio.ensure_future(count())
        await last_of(site.reader.rows(0))
        await last_of(site.reader.numbers(0))
        counting.cancel()

    asyncio.run(main())
    assert turns >= 2 * 64


def test_a_sample_that_is_half_taken_is_not_to_be_seen(site: Site) -> None:
    for number in range(3 * history_module.MODELS_A_STEP):
        site.serve(f"m{number:02}")
        site.traffic.count(f"m{number:02}", 3, 1000)
    site.look(3)
    before = site.rows()
    steps = site.history.steps(site.now_ns + 2 * SECOND)
    for _ in steps:
        now = site.rows()
        assert now["next_point"] == before["next_point"] or now["next_point"] == before["next_point"] + 1
        lengths = {len(model["points"]["requests_per_s"]) for model in now["models"]}
        assert lengths == {now["next_point"]}


def test_failures_kept_are_few_and_one_client_leaves_room_for_others() -> None:
    kept = FailedRequests()
    for number in range(100):
        kept.add("m", "INTERNAL", "x" * 5000, f"early-{number}", "10.0.0.1:99")
    kept.add("m", "INTERNAL", "mine", "r-1", "10.0.0.2:1")
    for number in range(1000):
        kept.add("m", "INTERNAL", "flood", f"r-{number}", f"10.0.0.1:{number}")
        kept.add("m", "INVALID_ARGUMENT", "flood", f"r-{number}", f"10.0.0.1:{number}")
    found = kept.of("m")
    assert len(found) == LAST_FAILURES
    assert [one.message for one in found].count("mine") == 1
    assert max(len(one.message) for one in found) <= 300
    assert len(kept.refused("m")) == LAST_REFUSALS
    for number in range(2 * FAILED_MODELS):
        kept.add(f"other-{number}", "INTERNAL", "no", "", "")
    assert len(kept._of) == FAILED_MODELS
    assert kept.of("nobody") == []


def test_failures_of_other_processes_are_placed_by_their_time() -> None:
    kept = FailedRequests()
    for at, request_id in ((5.0, "b"), (3.0, "a"), (7.0, "d"), (5.0, "c")):
        kept.keep("m", FailedRequest(at, "INTERNAL", "no", request_id))
    assert [one.request_id for one in kept.of("m")] == ["d", "c", "b", "a"]


def test_the_page_makes_no_markup_of_texts_and_names_no_other_server() -> None:
    for file in sorted(PAGE.iterdir()):
        text = file.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in text, f"{file.name}: {word}"
        addresses = [part[:40] for part in text.split("://")[1:]]
        assert [one for one in addresses if not one.startswith("www.w3.org/2000/svg")] == [], file.name
    html = (PAGE / "console.html").read_text()
    assert " style=" not in html
    assert re.search(r"<[^>]* on[a-z]+=", html) is None
