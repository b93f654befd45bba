"""Client memory: what may be opened, ranges at their limits, files that shrink, regions that go."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastserve._ext.flatten import walk_bytes
from fastserve.errors import Kind, ServeError
from fastserve.serving.client_shared_memory import REGIONS_MAX, Range, Regions, check_total, hold_buffers
from fastserve.tensor import DTYPES, TensorSpec

PAGE = 4096


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    (tmp_path / "two_pages").write_bytes(bytes(range(256)) * 32)
    found = Regions(True, str(tmp_path))
    yield found
    found.close()


def refused(call: object, *args: object) -> ServeError:
    with pytest.raises(ServeError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize("key", ["", "/", "///", ".", "/..", "/a/b", "../two_pages", "/\0", "/" + "a" * 300])
def test_keys_may_not_leave_the_folder(regions: Regions, key: str) -> None:
    fault = refused(regions.register, "r", key, 0, 16)
    assert fault.kind is Kind.INVALID_ARGUMENT
    assert fault.message == f"cannot register shared memory region 'r' - invalid shm key '{key}'"


def test_reserved_keys(regions: Regions) -> None:
    assert (
        "reserved prefix"
        in refused(regions.register, "r", "//triton_python_backend_shm_region_1", 0, 16).message
    )


def test_links_and_pipes_are_not_opened(regions: Regions, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "two_pages")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for key in ("/link", "/pipe", "/folder", "/nothing"):
        fault = refused(regions.register, "r", key, 0, 16)
        assert (fault.kind, fault.message) == (Kind.INTERNAL, f"Unable to open shared memory region: '{key}'")


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, 2 * PAGE + 1), (PAGE, PAGE + 1), (2**64 - PAGE, PAGE), (0, 2**64 - 1)]
)
def test_ranges_beyond_the_file(regions: Regions, offset: int, size: int) -> None:
    assert refused(regions.register, "r", "/two_pages", offset, size).message.endswith("invalid args")
    assert regions.list_files() == []


def test_a_second_region_on_one_key(regions: Regions) -> None:
    """It is as good as the first; one that does not fit is refused in words of its own, as 24.10 does."""
    regions.register("a", "/two_pages", 0, PAGE)
    regions.register("b", "/two_pages", PAGE, PAGE)
    assert regions.read(Range("b", 1, 2)) == b"\1\2"
    for offset, size in ((0, 3 * PAGE), (64, 64)):
        fault = refused(regions.register, "c", "/two_pages", offset, size)
        assert (fault.kind, fault.message) == (Kind.INTERNAL, "Invalid shared memory region: '/two_pages'")
    regions.unregister_all()
    fault = refused(regions.register, "c", "/two_pages", 64, 64)
    assert fault.message.endswith("unable to process address spaceInvalid argument")


def test_offsets_count_from_the_region(regions: Regions) -> None:
    regions.register("r", "/two_pages", PAGE, PAGE)
    assert regions.read(Range("r", 1, 3)) == b"\1\2\3"
    assert regions.read(Range("r", PAGE - 1, 0)) == b""
    for offset in (PAGE, PAGE + 1):
        assert refused(regions.read, Range("r", offset, 0)).message.startswith("Invalid offset for")
    for offset, size in ((PAGE - 1, 2), (1, 2**64 - 1), (0, 0)):
        assert "Invalid offset + byte size" in refused(regions.read, Range("r", offset, size)).message


def test_a_file_that_shrank_is_an_error(regions: Regions, tmp_path: Path) -> None:
    regions.register("r", "/two_pages", 0, 2 * PAGE)
    with regions.hold(Range("r", PAGE, 16)) as room:
        os.truncate(tmp_path / "two_pages", PAGE + 8)
        assert refused(room.write, bytes(16)).kind is Kind.INVALID_ARGUMENT
        assert refused(regions.read, Range("r", PAGE, 16)).kind is Kind.INVALID_ARGUMENT
    assert (tmp_path / "two_pages").stat().st_size == PAGE + 8  # and is never grown


def test_strings_are_walked_piece_by_piece(
    regions: Regions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory is, wherever a piece ends; what a string is long is not read."""
    texts = [b"", b"a" * 5, b"b" * 40, b"", b"", b"c" * 3, b"d" * 100]
    data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    (tmp_path / "strings").write_bytes(data + bytes(PAGE - len(data)))
    regions.register("r", "/strings", 0, PAGE)
    for piece in range(4, 40):
        monkeypatch.setattr("fastserve.serving.client_shared_memory.PIECE_BYTES", piece)
        for size in (*range(1, 30), len(data) - 1, len(data), len(data) + 2):
            for most in (1, 3, len(texts), len(texts) + 1):
                memory = (data + bytes(2))[:size]
                assert regions.walk(Range("r", 0, size), most) == walk_bytes(memory, most)


def test_strings_are_read_no_further_than_they_may_go(regions: Regions, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    regions.register("r", "/sparse", 0, 1 << 40)
    assert regions.walk(Range("r", 0, 1 << 40), 2) == (2, 4, 8)


def test_total_is_what_the_model_can_take() -> None:
    wide = TensorSpec("x", DTYPES["float32"], (1 << 20,))
    free = TensorSpec("y", DTYPES["bytes"], (-1,))
    version: Any = SimpleNamespace(
        model="m",
        inputs={"x": wide, "y": free},
        config=SimpleNamespace(max_queue_bytes=1 << 20, max_batch_size=2),
    )
    most = 2 * 4 << 20
    check_total(version, [Range("r", 0, most)])
    check_total(version, [])
    text = f"have {most + 1} bytes, model 'm' takes at most {most} \\(max_queue_bytes\\)"
    with pytest.raises(ServeError, match=text):
        check_total(version, [Range("r", 0, most), Range("s", 0, 1)])


def test_unregistered_while_a_request_runs(regions: Regions, tmp_path: Path) -> None:
    regions.register("r", "/two_pages", 0, PAGE)
    with regions.hold(Range("r", 8, 4)) as room:
        regions.unregister("r")
        room.write(b"done")
    assert (tmp_path / "two_pages").read_bytes()[8:12] == b"done"
    assert refused(regions.read, Range("r", 0, 1)).kind is Kind.NOT_FOUND


def test_descriptors_are_given_back(regions: Regions) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in "abc":
        regions.register(name, "/two_pages", 0, PAGE)
    refused(regions.register, "a", "/two_pages", 0, PAGE)
    refused(regions.register, "d", "/two_pages", 0, 3 * PAGE)
    regions.unregister_all()
    assert len(os.listdir("/proc/self/fd")) <= before  # an earlier test's may close meanwhile


def test_regions_are_counted(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve.serving.client_shared_memory.REGIONS_MAX", 1)
    assert REGIONS_MAX > 1
    regions.register("a", "/two_pages", 0, PAGE)
    assert refused(regions.register, "b", "/two_pages", 0, PAGE).kind is Kind.UNAVAILABLE


def test_off_unless_allowed() -> None:
    regions = Regions(False)
    for call, args in ((regions.register, ("r", "/x", 0, 1)), (regions.unregister, ("r",))):
        fault = refused(call, *args)
        assert fault.kind is Kind.UNIMPLEMENTED
        assert fault.message.startswith("Client shared memory is disabled.")


def test_no_descriptor_is_left(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rooms held before are given back, and the client hears why."""
    regions.register("r", "/two_pages", 0, PAGE)
    real, made = os.dup, []

    def dup(fd: int) -> int:
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(real(fd))
        return made[0]

    monkeypatch.setattr(os, "dup", dup)
    fault = refused(hold_buffers, regions, {"a": Range("r", 0, 8), "b": Range("r", 8, 8)})
    assert (fault.kind, fault.message) == (
        Kind.UNAVAILABLE,
        "shared memory region 'r' cannot be used: Too many open files",
    )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_a_file_that_cannot_take_what_is_written(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with placeholders, where memory is short."""
    regions.register("r", "/two_pages", 0, PAGE)

    def pwrite(fd: int, data: object, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with regions.hold(Range("r", 0, 4)) as room:
        assert refused(room.write, b"data").kind is Kind.UNAVAILABLE


def test_outputs_must_fit_their_rooms(regions: Regions, tmp_path: Path) -> None:
    regions.register("r", "/two_pages", 0, PAGE)
    with hold_buffers(regions, {"out": Range("r", 0, 4)}) as rooms:
        fault = refused(rooms["out"].put, "out", bytes(5))
        assert fault.message == (
            "shared memory size specified with the request for output 'out' (4 bytes) "
            "should be at least 5 bytes to hold the results"
        )
        rooms["out"].put("out", b"\0abc")
        rooms.close()  # once is enough: the numbers may be another's by now
        rooms.close()
    assert (tmp_path / "two_pages").read_bytes()[:4] == b"\0abc"
