"""Every conformance case, over real sockets, against its rig; `py-ref` cases with that server's settings."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf.json_format import MessageToDict, ParseDict

from tests.dialects.grps import deployments
from tests.dialects.grps.deviations import DEVIATIONS
from tests.dialects.grps.rig import GRPS, SERVICE, Deployed, Reply, deployed, settings_of

CASES = [json.loads(line) for line in Path("tests/vectors/grps.jsonl").read_text().splitlines()]
AS_PYTHON = {"flat_double": False, "strict_content_type": True}
CUSTOM = {"path": "/custom", "customized_body": True}
HEADER = {"streaming_ctrl": {"ctrl_mode": "header_param", "ctrl_key": "X-Stream"}}
RIGS = {"grps-echo": None, "grps-custom-http": CUSTOM, "grps-header-ctrl": HEADER}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The servers of this module by rig and profile."""
    with ExitStack() as stack:
        known: dict[tuple[str, str], Deployed] = {}
        for rig, profile in sorted({(case["rig"], case["profile"]) for case in CASES}):
            folder = deployments.write(tmp_path_factory.mktemp("deployed") / "d", custom=RIGS[rig])
            options = AS_PYTHON if profile == "py-ref" else {}
            known[rig, profile] = stack.enter_context(deployed(settings_of(folder, **options)))
        yield known


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any], servers: Any, tmp_path: Path) -> None:
    if case["id"] in DEVIATIONS:
        pytest.skip(DEVIATIONS[case["id"]])
    if case.get("fresh_server"):
        with deployed(settings_of(deployments.write(tmp_path / "d"))) as served:
            play(served, case)
    else:
        play(servers[case["rig"], case["profile"]], case)


def play(served: Deployed, case: dict[str, Any]) -> None:
    if "series" in case["id"]:
        served.predict({"str_data": "one"})
    for step in case.get("steps", [case]):
        if "concurrent" in step:
            with ThreadPoolExecutor(len(step["concurrent"])) as pool:
                list(pool.map(lambda one: ask(served, one), step["concurrent"]))
        else:
            ask(served, step)


def ask(served: Deployed, step: dict[str, Any]) -> None:
    request, wanted = step["request"], step["expect"]
    if "grpc" in request:
        check_rpc(served, request, wanted)
        return
    body = json.dumps(request["json"]).encode() if "json" in request else None
    body = request["body_text"].encode() if "body_text" in request else body
    headers = {name: value for name, value in request.get("headers", {}).items() if value is not None}
    check(served.ask(request["method"], request["path"], body, headers), wanted)


def check(reply: Reply, wanted: dict[str, Any]) -> None:
    assert reply.status == wanted["status"], reply
    for name, pattern in wanted.get("headers", {}).items():
        assert re.search(pattern, reply.headers[name.lower()]), reply.headers
    for key, value in wanted.items():
        if key not in ("status", "headers"):
            CHECKS[key](reply, value)


def check_rpc(served: Deployed, request: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert wanted["grpc_status"] == "OK"
    fields = {k.removesuffix("_b64"): v for k, v in request["message"].items()}
    sent = ParseDict(fields, GRPS.GrpsMessage())
    name = request["grpc"].rpartition("/")[2]
    assert SERVICE.strip("/") == request["grpc"].rpartition("/")[0]
    if name == "PredictStreaming":
        found = served.stream(**{k: getattr(sent, k) for k in fields})
        for message, part in zip(found, wanted["messages_subset"], strict=True):
            assert is_subset(part, as_case(message)), message
        return
    message = as_case(GRPS.GrpsMessage.FromString(served.send(name, sent.SerializeToString())))
    if "message" in wanted:
        assert message == wanted["message"]
    if "message_subset" in wanted:
        assert is_subset(wanted["message_subset"], message), message


def as_case(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    if "bin_data" in found:
        found["bin_data_b64"] = found.pop("bin_data")
    return found


def is_subset(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and is_subset(v, whole[k]) for k, v in part.items())
    return is_same(part, whole)


def is_same(wanted: Any, found: Any) -> bool:
    """Numbers by value: JSON has 2 and 2.0 for one."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and wanted.keys() == found.keys() and is_subset(wanted, found)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(wanted) == len(found) and all(map(is_same, wanted, found))
    if isinstance(wanted, float) and isinstance(found, int | float):
        return math.isclose(wanted, found)
    return bool(wanted == found)


def documents(body: bytes) -> list[Any]:
    """JSON objects without anything between them."""
    text, found, at = body.decode(), [], 0
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        found.append(value)
    return found


def at_path(reply: Reply, path: str) -> Any:
    value = reply.json
    for name in path.split("."):
        value = value[name]
    return value


def _contains(reply: Reply, wanted: dict[str, str]) -> None:
    assert all(text in at_path(reply, path) for path, text in wanted.items()), reply


def _json(reply: Reply, wanted: Any) -> None:
    assert is_same(wanted, reply.json), reply


def _subset(reply: Reply, wanted: Any) -> None:
    assert is_subset(wanted, reply.json), reply


def _body_contains(reply: Reply, wanted: list[str]) -> None:
    assert all(text.encode() in reply.body for text in wanted), reply


def _body_text(reply: Reply, wanted: str) -> None:
    assert reply.body == wanted.encode()


def _concatenated(reply: Reply, wanted: list[Any]) -> None:
    assert is_same(wanted, documents(reply.body)), reply


def _concatenated_subset(reply: Reply, wanted: list[Any]) -> None:
    found = documents(reply.body)
    assert len(found) == len(wanted), reply
    assert all(map(is_subset, wanted, found)), reply


def _documents(reply: Reply, wanted: int) -> None:
    assert len(documents(reply.body)) == wanted  # that each is a chunk: test_streams


def _yaml(reply: Reply, wanted: dict[str, Any]) -> None:
    assert all(is_subset(part, yaml.safe_load(at_path(reply, path))) for path, part in wanted.items()), reply


def _lengths(reply: Reply, wanted: dict[str, int]) -> None:
    assert {key: len(at_path(reply, key)) for key in wanted} == wanted


def _hex(reply: Reply, wanted: str) -> None:
    assert reply.body == bytes.fromhex(wanted)


def _base64(reply: Reply, wanted: str) -> None:
    assert reply.body == base64.b64decode(wanted)


CHECKS = {
    "json": _json,
    "json_subset": _subset,
    "json_path_contains": _contains,
    "body_contains": _body_contains,
    "body_text": _body_text,
    "body_hex": _hex,
    "body_b64": _base64,
    "concatenated_json": _concatenated,
    "concatenated_json_subset": _concatenated_subset,
    "http_chunks_each_json": _documents,
    "yaml_path_contains": _yaml,
    "json_len": _lengths,
}
