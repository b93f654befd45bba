"""A conformance case played against a server, and its expectations held against the replies."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.dialects.text_common.serving import Asking, Hosted, Reply
from tests.proc import stop
from tests.running import until

REPEATED = re.compile(r"<repeat:(.):(\d+)>")


def play(at: Asking, case: dict[str, Any]) -> None:
    """Every step of it."""
    for step in case.get("steps", [case]):
        if "concurrent_order" in step:
            _play_in_order(at, step)
        else:
            check(_ask(at, step["request"]), step["expect"])


def _ask(at: Asking, request: dict[str, Any]) -> Reply:
    body = json.dumps(_unfold(request["json"])).encode() if "json" in request else None
    body = request["body_text"].encode() if "body_text" in request else body
    headers = {name: value for name, value in request.get("headers", {}).items() if value is not None}
    return at.ask(request["method"], request["path"], body, headers)


def _unfold(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unfold(inner) for key, inner in value.items()}
    if isinstance(value, str):
        return REPEATED.sub(lambda found: found[1] * int(found[2]), value)
    return value


def _play_in_order(at: Asking, step: dict[str, Any]) -> None:
    """Requests that arrive one after another while the first holds the only slot."""
    assert isinstance(at, Hosted)
    bodies = step["concurrent_order"]
    ended: list[int] = []
    (hosted,) = at.server.host.hosted.values()
    (worker,) = hosted.group.pids
    ring = hosted.queue.ring
    # The server's own order: the threads of two clients may read their answers in the other one.
    at.server.front.http[0].access_log = lambda call, _, __: ended.append(bodies.index(json.loads(call.body)))

    def runs() -> bool:
        return any(ring.describe(n)[0] == "running" for n in range(ring.slots))

    def begin(pool: ThreadPoolExecutor) -> Future[Reply]:
        first = pool.submit(at.post, "/infer", bodies[0])
        until(lambda: runs() or first.done(), "it runs")
        stop(worker)  # until all the others wait
        return first

    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [begin(pool)]
        while not runs():  # it had ended before the worker was stopped
            os.kill(worker, signal.SIGCONT)
            assert asked[0].result().status == 200
            ended.clear()
            asked = [begin(pool)]
        try:
            for body in bodies[1:]:
                asked.append(pool.submit(at.post, "/infer", body))
                until(lambda: ring.outstanding() == len(asked), "it has arrived")
        finally:
            os.kill(worker, signal.SIGCONT)
        assert [each.result().status for each in asked] == [200] * len(bodies)
    assert ended == step["expect_completion_order"]


def check(reply: Reply, wanted: dict[str, Any]) -> None:
    for key, value in wanted.items():
        CHECKS[key](reply, value)


def is_subset(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and is_subset(v, whole[k]) for k, v in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and all(map(is_subset, part, whole)) and len(whole) >= len(part)
    return bool(part == whole)


def is_same(wanted: Any, found: Any) -> bool:
    """With `<number>` and `<int>` for any; the order of keys counts."""
    if wanted == "<number>":
        return type(found) in (int, float)
    if wanted == "<int>":
        return type(found) is int
    if isinstance(wanted, dict):
        return (
            isinstance(found, dict)
            and list(wanted) == list(found)
            and all(is_same(wanted[k], found[k]) for k in wanted)
        )
    return type(wanted) is type(found) and wanted == found


def at_path(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def _headers(reply: Reply, wanted: dict[str, str]) -> None:
    for name, pattern in wanted.items():
        assert re.search(pattern, reply.headers[name.lower()]), reply


def _events(reply: Reply, wanted: list[Any]) -> None:
    found = reply.events
    assert len(found) == len(wanted), reply
    for one, other in zip(wanted, found, strict=True):
        assert is_same(one, other), other


def _some_events(reply: Reply, wanted: list[Any]) -> None:
    payloads = re.findall(rb"^data: ?(\{.*\})$", reply.body, re.MULTILINE)
    assert all(map(is_subset, wanted, map(json.loads, payloads))), reply
    assert len(payloads) >= len(wanted)


def _true(said: bool, reply: Reply) -> None:
    assert said, reply


CHECKS: dict[str, Any] = {
    "status": lambda reply, wanted: _true(reply.status == wanted, reply),
    "status_in": lambda reply, wanted: _true(reply.status in wanted, reply),
    "headers": _headers,
    "json": lambda reply, wanted: _true(is_same(wanted, reply.json), reply),
    "json_subset": lambda reply, wanted: _true(is_subset(wanted, reply.json), reply),
    "json_has": lambda reply, wanted: _true(set(wanted) <= set(reply.json), reply),
    "json_absent": lambda reply, wanted: _true(not set(wanted) & set(reply.json), reply),
    "json_types": lambda reply, wanted: _true(
        all(type(at_path(reply.json, path)).__name__ == kind for path, kind in wanted.items()), reply
    ),
    "json_path_contains": lambda reply, wanted: _true(
        all(text in at_path(reply.json, path) for path, text in wanted.items()), reply
    ),
    "json_keys_in_order": lambda reply, wanted: _true(list(reply.json) == wanted, reply),
    "body_text": lambda reply, wanted: _true(reply.body == wanted.encode(), reply),
    "body_contains": lambda reply, wanted: _true(all(text.encode() in reply.body for text in wanted), reply),
    "raw_regex": lambda reply, wanted: _true(bool(re.search(wanted, reply.body.decode())), reply),
    "sse": _events,
    "sse_subset": _some_events,
    "sse_prefix": lambda reply, wanted: _true(
        all(line.startswith(wanted) for line in reply.body.decode().split("\n") if line), reply
    ),
    "sse_no_done": lambda reply, wanted: _true((b"[DONE]" in reply.body) != wanted, reply),
    "sse_last_raw": lambda reply, wanted: _true(reply.body.decode().rstrip("\n").endswith(wanted), reply),
}
