"""Client memory that shrinks, vanishes or never existed: an error, at once or later, and never a signal."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import Answer, Grpc, Http, Memory, ints, leaks, memory, message, tensor
from tests.running import Running, until

INFER = "/v2/models/types/infer"
HELD = "/v2/models/held/infer"
EDGES = [(2**64 - 1, 4), (4, 2**64 - 1), (2**64 - 4, 4), (2**63, 2**63), (4093, 4), (4097, 0), (0, 4097)]


def body(where: dict[str, Any], back: dict[str, Any] | None = None, name: str = "IN_INT32") -> dict[str, Any]:
    """`types` asked for one number that lies in memory, its answer there too or in the reply."""
    wanted: dict[str, Any] = {"name": name.replace("IN", "OUT", 1)}
    return {
        "inputs": [tensor(name, [1], **where)],
        "outputs": [{**wanted, "parameters": back} if back else wanted],
    }


def held_body(where: dict[str, Any], back: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": [tensor("IN", [1], **where)], "outputs": [{"name": "OUT", "parameters": back}]}


def grpc_body(region: Memory, side: str, offset: int, byte_size: int) -> Any:
    made = message("types", ("IN_INT32", "INT32", [1], ints(7) if side == "out" else None))
    asked = made.outputs.add(name="OUT_INT32")
    parameters = (made.inputs[0] if side == "in" else asked).parameters
    parameters["shared_memory_region"].string_param = region.name
    # as a C++ client's cast makes them of a size_t
    parameters["shared_memory_offset"].int64_param = offset - (offset >> 63 << 64)
    parameters["shared_memory_byte_size"].int64_param = byte_size - (byte_size >> 63 << 64)
    return made


@pytest.mark.parametrize(("offset", "byte_size"), EDGES)
@pytest.mark.parametrize("side", ["in", "out"])
def test_ranges_that_leave_the_region(
    served: Running, http: Http, grpc: Grpc, side: str, offset: int, byte_size: int
) -> None:
    with memory(http) as region:
        region.put(ints(7))
        where, good = region.place(offset, byte_size), region.place(0, 4)
        answer = http.post(INFER, body(where) if side == "in" else body(good, where))
        assert answer.status == 400
        assert answer.error.startswith("Invalid offset")
        assert not leaks(served, answer)
        told = grpc.infer(grpc_body(region, side, offset, byte_size))
        assert (told.status, told.error) == (3, answer.error)
        assert http.post(INFER, body(good)).json()["outputs"][0]["data"] == [7]


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        (0, 0),
        (0, 4097),
        (0, 2**64 - 1),
        (4096, 1),
        (2**64 - 4096, 4096),
        (2**63, 2**63),
        (1, 4),
        (2**64 - 1, 2),
    ],
)
def test_registering_ranges_that_leave_the_file(http: Http, grpc: Grpc, offset: int, byte_size: int) -> None:
    region = Memory(4096)
    try:
        given = {"key": region.key, "offset": offset, "byte_size": byte_size}
        assert http.post("/v2/systemsharedmemory/region/r/register", given).status == 400
        assert grpc.ask("SystemSharedMemoryRegister", name="r", **given).status == 3
        assert http.ask("GET", "/v2/systemsharedmemory/status").json() == []
    finally:
        os.close(region.fd)
        os.unlink(region.path)


@pytest.mark.parametrize("size", [0, 2, 4094])
def test_a_file_that_has_shrunk(served: Running, http: Http, grpc: Grpc, size: int) -> None:
    with memory(http) as region:
        region.put(ints(7), 4092)
        os.ftruncate(region.fd, size)
        where = region.place(4092, 4)
        for asked in (body(where), {**body(where, region.place(0, 4))}):
            answer = http.post(INFER, asked)
            assert (answer.status, answer.error.startswith("Invalid offset + byte size")) == (400, True)
            assert not leaks(served, answer)
        assert grpc.infer(grpc_body(region, "in", 4092, 4)).status == 3
        assert grpc.infer(grpc_body(region, "out", 4092, 4)).status == 3
        os.ftruncate(region.fd, 4096)
        assert http.post(INFER, body(where)).json()["outputs"][0]["data"] == [7 if size > 4092 else 0]


def run_held(served: Running, held: Path, region: Memory, meanwhile: Any) -> Answer:
    """A request to `held` that lies in memory both ways; `meanwhile` is done while the model runs."""
    region.put(ints(5))
    with Http(served) as waiting:
        asked = held_body(region.place(0, 4), region.place(1024, 4))
        thread = threading.Thread(target=lambda: found.append(waiting.post(HELD, asked)))
        found: list[Answer] = []
        thread.start()
        until((held / "began").exists, "the model runs")
        meanwhile()
        (held / "go").touch()
        thread.join()
    return found[0]


def test_a_file_that_shrinks_under_a_running_request(served: Running, http: Http, held: Path) -> None:
    with memory(http) as region:
        answer = run_held(served, held, region, lambda: os.ftruncate(region.fd, 0))
        assert answer.status == 400
        assert answer.error == f"Invalid offset + byte size for shared memory region: '{region.name}'"
        assert os.fstat(region.fd).st_size == 0, "the server grows no file of its clients"


def test_a_file_that_is_removed_under_a_running_request(served: Running, http: Http, held: Path) -> None:
    with memory(http) as region:
        answer = run_held(served, held, region, lambda: os.unlink(region.path))
        assert answer.status == 200
        assert region.get(4, 1024) == ints(5)


def test_a_region_that_is_unregistered_meanwhile(served: Running, http: Http, held: Path) -> None:
    """The request keeps what it holds, and lets it go when it ends; the name is free at once."""
    with memory(http) as region:
        path = f"/v2/systemsharedmemory/region/{region.name}"
        again = {"key": region.key, "byte_size": 4096}

        def unregister() -> None:
            assert http.post(f"{path}/unregister", {}).status == 200
            assert http.post(INFER, body(region.place(0, 4))).status == 404
            assert http.post(f"{path}/register", again).status == 200

        answer = run_held(served, held, region, unregister)
        assert answer.status == 200
        assert region.get(4, 1024) == ints(5)


def test_a_file_that_never_rests(served: Running, http: Http) -> None:
    """Shrunk and grown all the time while it is read and written: an answer or an error, each time."""
    with memory(http, 1 << 20) as region:
        over = threading.Event()

        def shake() -> None:
            while not over.is_set():
                os.ftruncate(region.fd, 0)
                os.ftruncate(region.fd, 1 << 20)

        shaker = threading.Thread(target=shake)
        shaker.start()
        try:
            where, back = region.place(0, 1 << 19), region.place(1 << 19, 1 << 19)
            asked = {
                "inputs": [tensor("IN_UINT8", [1 << 19], datatype="UINT8", **where)],
                "outputs": [{"name": "OUT_UINT8", "parameters": back}],
            }
            found = [http.post(INFER, asked) for _ in range(150)]
        finally:
            over.set()
            shaker.join()
        assert {answer.status for answer in found} <= {200, 400}
        assert all(answer.error.startswith("Invalid offset") for answer in found if answer.status == 400)
        assert not any(leaks(served, answer) for answer in found)


@pytest.mark.parametrize(
    "key", ["/", "///", "/..", "/.", "/a/../b", "/../etc/passwd", "/" + "a" * 300, "/a\\b\0c"]
)
def test_keys_that_lead_elsewhere(served: Running, http: Http, grpc: Grpc, key: str) -> None:
    given = {"key": key, "byte_size": 16}
    answer = http.post("/v2/systemsharedmemory/region/r/register", given)
    assert (answer.status, "invalid shm key" in answer.error) == (400, True)
    assert grpc.ask("SystemSharedMemoryRegister", name="r", **given).status == 3


def test_links_and_pipes(served: Running, http: Http, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4096))
    name = f"fastserve-test-{os.getpid()}"
    for make in (lambda: os.symlink(secret, f"/dev/shm/{name}"), lambda: os.mkfifo(f"/dev/shm/{name}")):
        make()
        try:
            answer = http.post(
                "/v2/systemsharedmemory/region/r/register", {"key": f"/{name}", "byte_size": 16}
            )
            assert (answer.status, answer.error) == (500, f"Unable to open shared memory region: '/{name}'")
        finally:
            os.unlink(f"/dev/shm/{name}")
