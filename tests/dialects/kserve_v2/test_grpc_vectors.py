"""Every captured case of the gRPC half, as the server answers it; of streams, every reply."""

from __future__ import annotations

import pytest

from tests.dialects.kserve_v2.replay import GRPC, Answers, Vector, expected_replies


@pytest.mark.parametrize("vector", GRPC, ids=[f"{v['id']}-{v['name']}"[:60] for v in GRPC])
def test_vector(vector: Vector, answers: Answers) -> None:
    code, details, replies = answers.grpc[vector["id"]]
    expected = vector["expect"]
    assert (code, details) == (expected["code"], expected["details"])
    assert replies == expected_replies(vector)
