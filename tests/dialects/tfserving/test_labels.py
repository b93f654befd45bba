"""Requests that name a version by its label: as fast as others, and with the version the label has now."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastserve.dialects.tfserving.predict import RestFastPath
from fastserve.net.request import Call
from tests.server.rig import run, serving, write_model


def test_a_label_takes_the_fast_path_and_may_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, numbers=(1, 2), labels={"best": 1}, version_policy="all")
    start, taken = RestFastPath.start, []

    def noted(self: RestFastPath, call: Call, raw: bool) -> bool:
        taken.append((self.version.number, start(self, call, raw)))
        return taken[-1][1]

    monkeypatch.setattr(RestFastPath, "start", noted)

    async def work() -> None:
        async with serving(tmp_path) as served:
            client = await served.client()
            model = served.server.catalog.models["twice"]
            for number in (1, 2, 1):
                model.labels = {"best": number}
                assert await client.predict(3.0, model="twice/labels/best") == (200, [6.0])
            model.labels = {}
            status, error = await client.predict(3.0, model="twice/labels/best")
            assert (status, error) == (400, "Unrecognized servable version label: best")
        assert taken == [(1, True), (2, True), (1, True)]

    run(work())
