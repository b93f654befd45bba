"""Configs that leave tensors to the model: what clients of this API see of those no config could describe."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from tests.backends import models as onnx_models
from tests.dialects.triton_v1.rig import rig
from tests.server.rig import run

ASKED = 'batch_size: 2 input { name: "x" dims: 3 } output { name: "y" } output { name: "z" }'


def test_rows_without_axes(tmp_path: Path) -> None:
    """`z` is one number a row, and no axis: shown as one axis of one element, as config.pbtxt has no word
    for none."""
    onnx_models.affine(tmp_path)
    (tmp_path / "net" / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 4')

    async def ask() -> None:
        async with rig(tmp_path) as served:
            for ask in served.ways:
                for _ in range(3):  # the fast path as well
                    result = await ask("net", ASKED, struct.pack("<6f", 1, 2, 3, 4, 5, 6))
                    assert result.status == "SUCCESS"
                    assert [list(one.raw.dims) for one in result.header.output] == [[3], [1]]
                    assert struct.unpack("<2f", result.raws[1]) == (15.0, 33.0)
            best = ASKED.replace('"y"', '"y" cls { count: 1 }')
            result = await served.over_grpc("net", best, struct.pack("<6f", 1, 2, 3, 4, 5, 6))
            rows = result.header.output[0].batch_classes
            assert [(row.cls[0].idx, row.cls[0].value) for row in rows] == [(2, 7.0), (2, 13.0)]

    run(ask())
