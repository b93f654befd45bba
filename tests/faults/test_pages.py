"""Web pages of other sites, open in a browser that can reach the server: they change nothing here.

What a page can make a browser send without being asked first: a POST of text/plain, form data or nothing,
with `Origin` and `Sec-Fetch-Site` set by the browser.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import grpc as grpcio
import pytest

from tests.faults.rig import MESSAGES, SERVICE, Http, pair
from tests.running import WAIT_S, Running

CONFIG = {
    "backend": "python",
    "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
}
OWN = "https://models.example"
V2 = (
    "/v2/repository/models/sums/load",
    "/v2/repository/models/sums/unload",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/sums/trace/setting",
    "/v2/systemsharedmemory/region/x/register",
    "/v2/systemsharedmemory/region/x/unregister",
    "/v2/systemsharedmemory/unregister",
    "/v2/cudasharedmemory/region/x/register",
    "/v2/cudasharedmemory/unregister",
)
V1 = (
    "/api/modelcontrol/load/sums",
    "/api/modelcontrol/unload/sums",
    "/api/sharedmemorycontrol/register/x//x/0/1",
    "/api/sharedmemorycontrol/unregister/x",
    "/api/sharedmemorycontrol/unregisterall",
    "/api/sharedmemorycontrol/cudaregister/x/1/0",
)
PAGES = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://t"},  # the Host these requests are sent with: a name, so it may have been rebound
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
)


@pytest.mark.parametrize("path", [*V2, *V1])
@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
def test_administration(http: Http, path: str, content_type: str) -> None:
    for page in PAGES:
        answer = http.ask("POST", path, b"{}", Content_Type=content_type, **page)
        assert answer.status == 403, (page, answer)
        assert "another site" in answer.error or "another site" in answer.headers["nv-status"]
    assert http.post("/v2/models/sums/infer", pair()).status == 200


def test_what_a_page_may_still_ask(http: Http) -> None:
    """Inference and metadata are for whoever reaches the port."""
    for page in PAGES:
        assert http.ask("GET", "/v2/models/sums", **page).status == 200
        assert http.post("/v2/models/sums/infer", pair(), **page).status == 200
        assert http.post("/v2/repository/index", {}, **page).status == 200
        assert http.ask("GET", "/api/status", **page).status == 200


def test_other_clients_need_no_header(http: Http) -> None:
    load = "/v2/repository/models/sums/load"
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded", "application/json"):
        headers = {"Content_Type": content_type} if content_type else {}
        assert http.ask("POST", load, b"{}", **headers).status == 200
    assert http.ask("POST", "/api/modelcontrol/load/sums").status == 200


def test_rpcs_that_say_they_come_from_a_page(served: Running) -> None:
    page = (("origin", "http://evil.example"),)
    with grpcio.insecure_channel(served.grpc) as channel:
        for name in ("RepositoryModelLoad", "LogSettings", "TraceSetting", "SystemSharedMemoryUnregister"):
            data = getattr(MESSAGES, f"{name}Request")().SerializeToString()
            with pytest.raises(grpcio.RpcError) as refused:
                channel.unary_unary(SERVICE + name)(data, timeout=WAIT_S, metadata=page)
            assert refused.value.code() is grpcio.StatusCode.PERMISSION_DENIED
        call = channel.unary_unary(SERVICE + "ServerLive")
        assert call(b"", timeout=WAIT_S, metadata=page)


def brought(mark: Path) -> dict[str, Any]:
    """A load whose model writes a file when it is read."""
    code = base64.b64encode(f"open({str(mark)!r}, 'w')\n".encode()).decode()
    return {"parameters": {"config": json.dumps(CONFIG), "file:1/model.py": code}}


def test_without_being_told_to_the_server_takes_no_code_and_no_settings(models: Path, tmp_path: Path) -> None:
    """Explicit control alone, as many run it: the load of a page, and of anybody, that brings code."""
    mark = tmp_path / "ran"
    options = ("--model-control", "explicit", "--admin-origins", OWN)
    with Running(models, tmp_path / "log", *options) as served, Http(served) as http:
        load = "/v2/repository/models/new/load"
        page = {"Origin": "http://evil.example", "Content_Type": "text/plain"}
        assert http.post(load, brought(mark), **page).status == 403
        answer = http.post(load, brought(mark))
        assert (answer.status, "--admin-file-overrides" in answer.error) == (501, True)
        request = MESSAGES.RepositoryModelLoadRequest(model_name="new")
        request.parameters["config"].string_param = json.dumps(CONFIG)
        request.parameters["file:1/model.py"].bytes_param = b"open('x', 'w')"
        with grpcio.insecure_channel(served.grpc) as channel:
            with pytest.raises(grpcio.RpcError) as refused:
                channel.unary_unary(SERVICE + "RepositoryModelLoad")(request.SerializeToString())
            assert refused.value.code() is grpcio.StatusCode.UNIMPLEMENTED
            settings = MESSAGES.LogSettingsRequest()
            shown = channel.unary_unary(SERVICE + "LogSettings")(settings.SerializeToString())
            assert MESSAGES.LogSettingsResponse.FromString(shown).settings["log_info"].bool_param
            settings.settings["log_info"].bool_param = False
            with pytest.raises(grpcio.RpcError) as refused:
                channel.unary_unary(SERVICE + "LogSettings")(settings.SerializeToString())
            assert refused.value.code() is grpcio.StatusCode.UNIMPLEMENTED
        answer = http.post("/v2/logging", {"log_info": False})
        assert (answer.status, "--admin-log-settings" in answer.error) == (501, True)
        assert http.ask("GET", "/v2/logging").json()["log_info"] is True
        for path in ("/v2/repository/models/sums/load", "/api/modelcontrol/load/sums"):
            assert http.post(path, {}, Origin=OWN, Content_Type="application/json").status == 200, (
                "a page of the site it was told of"
            )
            assert http.ask("POST", path, b"{}", Origin=OWN, Content_Type="text/plain").status == 403
        assert http.post("/v2/models/sums/infer", pair()).status == 200
    assert not mark.exists()
