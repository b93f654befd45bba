"""Every captured case, as the server answers it; of streams, every reply. In one file, since the
server that answers both halves is dear."""

from __future__ import annotations

import pytest

from tests.dialects.kserve.replay import (
    GRPC,
    HTTP,
    Answers,
    Vector,
    differences,
    expected_replies,
    read_reply,
)

every_vector = pytest.mark.parametrize("vector", GRPC, ids=[f"{v['id']}-{v['name']}"[:60] for v in GRPC])


@pytest.mark.parametrize("vector", HTTP, ids=[f"{v['id']}-{v['name']}"[:60] for v in HTTP])
def test_vector(vector: Vector, answers: Answers) -> None:
    assert list(differences(vector["expect"], *answers.http[vector["id"]])) == []


def test_a_head_with_a_body_ends_its_connection(answers: Answers) -> None:
    """So that nobody takes the body for the beginning of the next reply."""
    status, headers, body = answers.http["v2-http-012"]
    assert (status, headers["connection"], headers["content-length"]) == (405, "close", str(len(body)))


@every_vector
def test_vector_over_grpc(vector: Vector, answers: Answers) -> None:
    code, details, replies, _ = answers.grpc[vector["id"]]
    expected = vector["expect"]
    assert (code, details) == (expected["code"], expected["details"])
    assert [read_reply(vector, reply) for reply in replies] == expected_replies(vector)
