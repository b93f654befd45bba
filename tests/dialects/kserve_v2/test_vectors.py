"""Every captured case of the HTTP half, as the server answers it."""

from __future__ import annotations

import pytest

from tests.dialects.kserve_v2.replay import HTTP, Answers, Vector, differences


@pytest.mark.parametrize("vector", HTTP, ids=[f"{v['id']}-{v['name']}"[:60] for v in HTTP])
def test_vector(vector: Vector, answers: Answers) -> None:
    assert list(differences(vector["expect"], *answers.http[vector["id"]])) == []


def test_a_head_with_a_body_ends_its_connection(answers: Answers) -> None:
    """So that nobody takes the body for the beginning of the next reply."""
    status, headers, body = answers.http["v2-http-012"]
    assert (status, headers["connection"], headers["content-length"]) == (405, "close", str(len(body)))
