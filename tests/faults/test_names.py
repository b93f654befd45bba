"""Names that try to escape their folder, over HTTP and gRPC; and JSON that is nested too deeply."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.faults.rig import CLOSED, Grpc, Http, leaks, pair
from tests.running import Running

DOTS = (
    "..", ".", "...", "..;", ".. ", " ..", "..\t", "..\x01", "..%00", "%2e%2e", "%2E%2E", ".%2e",
    "%252e%252e", "%c0%ae%c0%ae", "%uff0e%uff0e", "\u2024\u2024", "\uff0e\uff0e", "..\u200b",
)  # fmt: skip
SLASHES = ("/", "//", "\\", "\\\\", "/./", "%2f", "%2F", "%5c", "%252f")
LOOKALIKES = ("%c0%af", "\u2215", "\uff0f", "\u29f5")
TRAVERSALS = [
    *(f"{dots}{slash}sums" for dots in DOTS for slash in SLASHES),
    *(f"{dots}{slash}etc/passwd" for dots in DOTS[:4] for slash in LOOKALIKES),
    *DOTS,
    *("/", "//", "\\", "\0", "sums\0", "\0sums", "sums/", "sums/.", "sums/..", "./sums", "sums/1", "/sums"),
    *("~", "~root", "$HOME", "C:\\", "\\\\server\\share", "file:///etc/passwd", "a" * 300, "a" * 5000),
    *("\u00e4" * 200, "CON", "{}", "%s%n", "${jndi:x}", "'; --", "\udcff"),
    *("sums\n", "sums\r\nX: y", "-rf", "*", "?"),
]  # fmt: skip


@pytest.fixture(scope="module")
def outside(models: Path) -> Path:
    """A model beside the repository, and links into it from within."""
    folder = models.parent / "outside" / "secret" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text("raise SystemExit('must never run')")
    (folder.parent / "config.pbtxt").write_text('backend: "python"\n')
    (models / "link").symlink_to(folder.parent)
    (models / "files").mkdir()
    (models / "files" / "1").symlink_to(folder)
    (models / "files" / "config.pbtxt").symlink_to(folder.parent / "config.pbtxt")
    return folder


def test_there_are_200() -> None:
    assert len(set(TRAVERSALS)) >= 200


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_names_of_models_over_http(served: Running, http: Http, verb: str) -> None:
    """As they are, and percent-encoded once; the server decodes nothing."""
    for name in TRAVERSALS:
        spellings = {quote(name, safe="", errors="surrogateescape")}
        if not set(name) & set(" \t\r\n\0"):
            spellings.add(name)
        for written in spellings:
            answer = http.post(f"/v2/repository/models/{written}/{verb}", {})
            allowed = (400, 404, 405, 414, 500) if verb == "load" else (200, 400, 404, 405, 414)
            assert answer.status in (*allowed, CLOSED), (written, answer)
            assert not leaks(served, answer, written), written
    assert http.post("/v2/models/sums/infer", pair()).status == 200


def test_names_of_models_over_grpc(served: Running, grpc: Grpc, http: Http) -> None:
    for name in TRAVERSALS:
        if "\udcff" in name:
            continue  # no string of protobuf
        answer = grpc.ask("RepositoryModelLoad", model_name=name)
        assert answer.status in (3, 5, 13), (name, answer)
        assert not leaks(served, answer, name), name
        assert not leaks(served, grpc.ask("RepositoryModelUnload", model_name=name), name)
        for method in ("ModelMetadata", "ModelConfig"):
            assert grpc.ask(method, name=name).status in (3, 5)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


@pytest.mark.logs_errors
@pytest.mark.parametrize("name", ["link", "files", "secret"])
def test_links_that_lead_out(served: Running, http: Http, grpc: Grpc, outside: Path, name: str) -> None:
    answer = http.post(f"/v2/repository/models/{name}/load", {})
    assert answer.status in (400, 500)
    assert not leaks(served, answer)
    assert grpc.ask("RepositoryModelLoad", model_name=name).status in (3, 13)
    assert "must never run" not in served.log.read_text()


FILES = [
    "", "/", ".", "..", "../x", "1/../../x", "1/../x/../..", "/tmp/x.traversal",
    "//tmp/x.traversal", "1/\0/x", "1/x\0", "\0", "a/" * 300 + "x",
    "x" * 600, "1/" + "x" * 300, "1/model.py/..", "1//../../x", "./../x", "1/./../../x",
]  # fmt: skip
CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
}


@pytest.mark.parametrize("place", FILES, ids=lambda place: repr(place[:20]))
def test_places_of_files(served: Running, http: Http, grpc: Grpc, place: str) -> None:
    """Files that a client brings along land in its model's folder or nowhere."""
    before = set(os.listdir(Path(served.log).parent)), set(os.listdir("/"))
    given = {"config": json.dumps(CONFIG), f"file:{place}": base64.b64encode(b"x").decode()}
    answer = http.post("/v2/repository/models/brought/load", {"parameters": given})
    assert answer.status in (400, 500)
    assert not leaks(served, answer)
    request: dict[str, Any] = {
        "config": {"string_param": json.dumps(CONFIG)},
        f"file:{place}": {"bytes_param": b"x"},
    }
    answer = grpc.ask("RepositoryModelLoad", model_name="brought", parameters=request)
    assert answer.status in (3, 13)
    assert not leaks(served, answer)
    assert (set(os.listdir(Path(served.log).parent)), set(os.listdir("/"))) == before
    assert not os.path.exists("/tmp/x.traversal")


def test_files_one_under_the_other(served: Running, http: Http) -> None:
    """A file where another one's folder would be."""
    data = base64.b64encode(b"x").decode()
    given = {"config": json.dumps(CONFIG), "file:1": data, "file:1/model.py": data}
    answer = http.post("/v2/repository/models/brought/load", {"parameters": given})
    assert answer.status in (400, 500)
    assert not leaks(served, answer)


def test_files_that_are_not_base64(http: Http) -> None:
    given = {"config": json.dumps(CONFIG), "file:1/model.py": "***"}
    answer = http.post("/v2/repository/models/brought/load", {"parameters": given})
    assert (answer.status, "not base64" in answer.error) == (400, True)


# --- JSON ------------------------------------------------------------------------------------------

READERS = {
    "infer": "/v2/models/{}/infer",
    "generate": "/v2/models/{}/generate",
    "generate_stream": "/v2/models/{}/generate_stream",
    "trace": "/v2/trace/setting",
    "model trace": "/v2/models/{}/trace/setting",
    "logging": "/v2/logging",
    "index": "/v2/repository/index",
    "load": "/v2/repository/models/{}/load",
    "system": "/v2/systemsharedmemory/region/r/register",
    "cuda": "/v2/cudasharedmemory/region/r/register",
}
WHERE = {
    "the whole": "{}",
    "a member": '{{"parameters": {}}}',
    "a parameter": '{{"parameters": {{"p": {}}}}}',
    "an unknown member": '{{"no one knows": {}}}',
    "an input": '{{"inputs": [{}]}}',
    "data": '{{"inputs": [{{"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": {}}}]}}',
    "an input's parameter": (
        '{{"inputs": [{{"name": "INPUT0", "shape": [1], "datatype": "INT32", "parameters": {{"p": {}}}}}]}}'
    ),
    "an output": '{{"inputs": [], "outputs": [{{"name": "OUTPUT0", "parameters": {{"p": {}}}}}]}}',
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("model", ["sums", "simple"])
def test_deep_json(served: Running, http: Http, reader: str, model: str) -> None:
    """101 levels and 500 000, of arrays and of objects, at every place a body has."""
    path = READERS[reader].format(model)
    for depth in (101, 500_000):
        for opened, closed in (("[", "]"), ('{"a":', "}")):
            for where in WHERE.values():
                for end in (closed * depth, ""):
                    text = where.format(opened * depth + "1" + end)
                    answer = http.ask("POST", path, text.encode())
                    assert answer.status >= 400, (text[:80], answer)
                    assert not leaks(served, answer)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


def test_deep_json_of_an_unload(served: Running, http: Http) -> None:
    """An unload reads no more of its body than one flag: whatever else it holds, the model goes."""
    for text in ("[" * 500_000, '{"parameters": {"unload_dependents": ' + '{"a":' * 101 + "1" + "}" * 103):
        answer = http.ask("POST", "/v2/repository/models/nope/unload", text.encode())
        assert answer.status == 200, (text[:80], answer)
        assert not leaks(served, answer)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


def test_a_config_of_great_depth(served: Running, http: Http, grpc: Grpc) -> None:
    for config in (
        "[" * 500_000,
        '{"parameters": {"a": {"string_value": ' + "[" * 500_000,
        '{"a":' * 101 + "1" + "}" * 101,
    ):
        answer = http.post("/v2/repository/models/sums/load", {"parameters": {"config": config}})
        assert answer.status in (400, 500)
        assert not leaks(served, answer)
        asked = {"config": {"string_param": config}}
        assert grpc.ask("RepositoryModelLoad", model_name="sums", parameters=asked).status in (3, 13)
    assert http.post("/v2/models/sums/infer", pair()).status == 200


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "text", ["", "null", "1", '"', "[", "{", '{"parameters":', "\x00", "\udcff", "nul", "9" * 10_000]
)
def test_what_is_no_request(served: Running, http: Http, reader: str, text: str) -> None:
    path = READERS[reader].format("nope" if reader == "load" else "simple")
    answer = http.ask("POST", path, text.encode("utf-8", "surrogateescape"))
    assert answer.status in (200, 400, 500)
    assert answer.status != 200 or reader in ("index", "unload", "trace", "model trace", "logging"), answer
    assert not leaks(served, answer)
