"""The list of deviations stays short and true, and no kind of vector about calls is left out."""

from __future__ import annotations

from pathlib import Path

from tests.dialects.tfserving.deviations import DEVIATIONS
from tests.dialects.tfserving.vectors import ALL

OWN_KINDS = {
    "parse_predict_request",
    "parse_classify_regress_request",
    "make_json_from_tensors",
    "make_json_from_classification",
    "make_json_from_regression",
    "make_json_from_status",
    "url_parse",
    "http",
    "rest_e2e",
    "rest_status_body",
    "rest_metadata_body",
    "status_to_http",
    "prometheus_text",
    "prometheus_bounds",
    "grpc",
    "grpc_details",
}
ELSEWHERE = {
    "float_format",  # tests of the writer
    "version_policy",  # tests of the repository
    "tensor_proto_decode",  # tests/ext
    "batch_run",
    "batch_round_up",
    "batch_config",
    "flag_parse",
    "startup_error",
}


def test_deviations_are_few_and_real() -> None:
    assert len(DEVIATIONS) < 10
    for prefix, reason in DEVIATIONS.items():
        assert reason
        assert any(vector["id"].startswith(prefix) for vector in ALL)


def test_every_kind_of_ours_is_run() -> None:
    assert {vector["kind"] for vector in ALL} <= OWN_KINDS | ELSEWHERE
    others = (path for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name)
    tests = "".join(path.read_text() for path in others)
    assert [kind for kind in OWN_KINDS if f'@each("{kind}")' not in tests] == []
