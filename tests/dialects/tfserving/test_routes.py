"""URLs: every vector, and the corners the patterns must not have."""

from __future__ import annotations

import pytest

from fastserve.codec.json_text import target_text
from fastserve.dialects.tfserving.routes import Target, VersionOverflow, is_api, parse_target
from tests.dialects.tfserving.fakes import ask, dialect_of, standard_engine
from tests.dialects.tfserving.vectors import Vector, each


@each("url_parse")
def test_vector(vector: Vector) -> None:
    given, expected = vector["input"], vector["expected"]
    if "error" in expected:
        with pytest.raises(VersionOverflow) as caught:
            parse_target(given["method"], given["path"])
        assert str(caught.value) == expected["error"]
        reply = ask(dialect_of(standard_engine()), given["method"], given["path"])
        assert (reply.status, reply.body) == (expected["http_status"], expected["http_body"].encode())
        return
    got = parse_target(given["method"], given["path"])
    if not expected["matched"]:
        assert got is None
        return
    verb = expected.get("method", expected.get("subresource"))
    assert got == Target(expected["model_name"] or "", expected["version"], expected["label"], verb)


@pytest.mark.parametrize(
    ("target", "api"),
    [
        ("/v1/", True),
        ("/V1/x", True),
        ("/v1", False),
        ("/v1x/models", False),
        ("/", False),
        ("/v2/models", False),
    ],
)
def test_what_is_the_api(target: str, api: bool) -> None:
    assert is_api(target) == api


def test_words_match_in_ascii_case_only() -> None:
    # U+017F folds to "s" and U+0660 is a digit for patterns over text; neither may match here.
    for target in ("/v1/model\u017f/m:predict", "/v1/models/m/versions/\u0660:predict"):
        raw = target.encode().decode("latin-1")
        assert parse_target("POST", raw) is None


def test_a_name_that_is_no_utf8_comes_back_as_it_was() -> None:
    target = parse_target("GET", "/v1/models/%ff%FE")
    assert target is not None
    assert target.name.encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert target_text("/v1/\xe9").encode("utf-8", "surrogateescape") == b"/v1/\xe9"


def test_a_version_of_thousands_of_digits_is_refused_quickly() -> None:
    with pytest.raises(VersionOverflow):
        parse_target("GET", "/v1/models/m/versions/" + "9" * 8000)
    target = parse_target("GET", "/v1/models/m/versions/" + "0" * 8000 + "7")
    assert target is not None
    assert target.version == 7
