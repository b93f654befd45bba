"""API keys of running servers: rotation under load on several fronts, certificates, pages, the start."""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
import threading
from collections import Counter
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from fastserve.dialects.admin.key_page import SCRIPT, STYLE
from fastserve.settings.key_file import KeyEntry, changing, make_key
from tests.certificates import authority, issue, root_file, trusting
from tests.running import QUICK_DEMO, Running, run_command, until

PREDICT = "/v1/models/half_plus_two:predict"
BODY = json.dumps({"instances": [1.0, 2.0, 5.0]}).encode()
EVERYTHING = ("health", "metadata", "metrics", "infer", "admin")


def add(path: Path, name: str, *scopes: str) -> dict[str, str]:
    """Add a key; the headers of its client."""
    with changing(path) as entries:
        text, entry = make_key(name, scopes or EVERYTHING)  # type: ignore[arg-type]
        entries.append(entry)
    return {"Authorization": f"Bearer {text}"}


def revoke(path: Path, name: str) -> None:
    with changing(path) as entries:
        entries[:] = [entry for entry in entries if entry.name != name]


def serving(folder: Path, *flags: str) -> Running:
    options = ("--keys", str(folder / "keys.yaml"), "--keys-poll-s", "0.05", *flags)
    return Running(Path("demo"), folder / "log", *QUICK_DEMO, *options)


def status(place: str, verb: str, target: str, headers: dict[str, str], body: bytes | None = None) -> int:
    with closing(http.client.HTTPConnection(place, timeout=60)) as link:
        link.request(verb, target, body, headers)
        return link.getresponse().status


def page(place: str, target: str, headers: dict[str, str]) -> tuple[int, str, http.client.HTTPMessage]:
    with closing(http.client.HTTPConnection(place, timeout=60)) as link:
        link.request("GET", target, headers=headers)
        reply = link.getresponse()
        return reply.status, reply.read().decode(), reply.headers


def test_rotation_loses_no_request_and_lets_nobody_in(tmp_path: Path) -> None:
    """Two fronts, connections that stay open, the file rewritten all the while, and broken now and then."""
    path = tmp_path / "keys.yaml"
    good, other = add(path, "good"), add(path, "other")
    wrong = {"x-api-key": make_key("w", ("infer",))[0]}
    got: dict[str, Counter[int]] = {"good": Counter(), "wrong": Counter(), "none": Counter()}
    ended = threading.Event()

    with serving(tmp_path, "--frontends", "2") as server:

        def ask(name: str, headers: dict[str, str]) -> None:
            with closing(http.client.HTTPConnection(server.http, timeout=60)) as link:
                while not ended.is_set():
                    link.request("POST", PREDICT, BODY, headers)
                    reply = link.getresponse()
                    reply.read()
                    got[name][reply.status] += 1

        asked = (("good", good), ("good", good), ("wrong", wrong), ("none", {}))
        threads = [threading.Thread(target=ask, args=one) for one in asked]
        for thread in threads:
            thread.start()
        for turn in range(10):
            fresh = add(path, f"fresh{turn}")
            until(lambda fresh=fresh: status(server.http, "GET", "/v2", fresh) == 200, "a new key is known")
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            until(lambda: "stay as they were" in server.log.read_text(), "a broken file is told of")
            path.write_bytes(whole)
            revoke(path, f"fresh{turn}")
        revoke(path, "other")
        until(lambda: {status(server.http, "GET", "/v2", other) for _ in range(8)} == {401}, "revoked")
        ended.set()
        for thread in threads:
            thread.join()
        for line in ("fastserve_api_keys 1.0", "fastserve_api_keys_stale 0.0"):
            until(lambda line=line: f"\n{line}\n" in page(server.http, "/metrics", good)[1], line)
    assert set(got["good"]) == {200}
    assert got["good"][200] > 50
    assert set(got["wrong"]) == set(got["none"]) == {401}
    log = server.log.read_text()
    for headers in (good, other):
        assert headers["Authorization"].split()[1] not in log


def test_a_key_for_some_models_on_several_fronts(tmp_path: Path) -> None:
    """Each front has the catalog from the owner; connections go to all of them."""
    path = tmp_path / "keys.yaml"
    with changing(path) as entries:
        text, entry = make_key("half", ("infer", "metadata"), models=("half*",))
        entries.append(entry)
    half = {"Authorization": f"Bearer {text}"}
    with serving(tmp_path, "--frontends", "3") as server:
        for _ in range(12):
            assert status(server.http, "POST", PREDICT, half, BODY) == 200
            assert status(server.http, "GET", "/v1/models/digits", half) == 403
            with closing(http.client.HTTPConnection(server.http, timeout=60)) as link:
                link.request("POST", "/v2/repository/index", headers=half)
                listed = {one["name"] for one in json.loads(link.getresponse().read())}
                assert listed == {"half_plus_two"}


def test_a_broken_file_is_on_the_metrics_page(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    good = add(path, "good")
    with serving(tmp_path) as server:
        path.write_text("keys: {")
        until(lambda: "fastserve_api_keys_stale 1" in page(server.http, "/metrics", good)[1], "it is told")
        assert server.log.read_text().count("the API keys stay as they were") == 1


def test_a_server_does_not_start_without_the_file(tmp_path: Path) -> None:
    flags = ["--http", "127.0.0.1:0", "--grpc", "off", "--keys", str(tmp_path / "none.yaml")]
    ended = run_command("serve", "demo", *flags)
    assert ended.returncode == 1
    assert "none.yaml: cannot be read: No such file or directory" in ended.stderr


def test_a_certificate_in_place_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with changing(path) as entries:
        entries.append(KeyEntry("ops", ("infer",), subject="O=acme,OU=unit,CN=ops"))
    mine = issue(tmp_path)
    tls = ["--tls-cert", mine.cert, "--tls-key", mine.key, "--tls-client-ca", str(root_file(tmp_path))]

    def ask(context: ssl.SSLContext) -> int:
        with closing(http.client.HTTPSConnection(server.http, context=context, timeout=60)) as link:
            link.request("POST", PREDICT, BODY)
            return link.getresponse().status

    with serving(tmp_path, *tls, "--tls-client-auth", "optional") as server:
        for unit, name, expected in (
            ("unit", "ops", 200),
            ("unit", "somebody", 401),
            ("unit,CN=ops", None, 401),  # one value that reads as two
        ):
            client = authority().issue_cert(
                "127.0.0.1", common_name=name, organization_name="acme", organization_unit_name=unit
            )
            context = trusting()
            client.configure_cert(context)
            assert ask(context) == expected, (unit, name)
        assert ask(trusting()) == 401


@pytest.mark.parametrize("target", ["/console", "/docs"])
def test_a_browser_is_asked_for_the_key(tmp_path: Path, target: str) -> None:
    path = tmp_path / "keys.yaml"
    good, weak = add(path, "good"), add(path, "weak", "infer")
    browser = {"Accept": "text/html,*/*"}
    with serving(tmp_path) as server:
        for headers, code in (({}, 401), (weak, 403)):
            told, body, named = page(server.http, target, {**browser, **headers})
            assert told == code
            assert 'type="password"' in body
            policy = named["Content-Security-Policy"]
            for text in (SCRIPT, STYLE):  # what the policy names is in the page
                digest = base64.b64encode(sha256(text.encode()).digest()).decode()
                assert f"'sha256-{digest}'" in policy
                assert f">{text}</" in body
            assert "unsafe" not in policy
            assert page(server.http, target, headers)[0] == code  # a client that is no browser
            assert page(server.http, target, headers)[1].startswith("{")
        told, body, _ = page(server.http, target, {**browser, **good})
        assert told == 200
        for part in re.findall(r'(?:src|href)="([^"]+\.(?:js|css))"', body):
            there = part if part.startswith("/") else f"/{part}"
            assert status(server.http, "GET", there, {}) == 401
            assert status(server.http, "GET", there, good) == 200


def test_the_document_says_that_it_asks(tmp_path: Path) -> None:
    good = add(tmp_path / "keys.yaml", "good")
    with serving(tmp_path) as server:
        document = json.loads(page(server.http, "/openapi.json", good)[1])
    schemes = document["components"]["securitySchemes"]
    assert schemes["bearer"]["scheme"] == "bearer"
    assert document["security"] == [{name: []} for name in schemes]
