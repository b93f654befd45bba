"""Folders on their way: whole, once, and never outside of the cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from fastserve._ext.remote_batches import ProtocolFault
from fastserve.workers.remote.files import ShippedFile, ShippedFolder, check_path, fetch_folder
from fastserve.workers.remote.protocol import PIECE_BYTES, FileRequest


def make(folder: Path) -> ShippedFolder:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "model.py").write_text("class Model: ...")
    (folder / "a" / "b" / "large").write_bytes(os.urandom(2 * PIECE_BYTES + 17))
    (folder / "empty").touch()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    return ShippedFolder(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_folder_arrives_whole_and_once(tmp_path: Path) -> None:
    shipped = make(tmp_path / "from")
    asked: list[FileRequest] = []

    def read(one: FileRequest) -> bytes:
        asked.append(one)
        return shipped.read(one)

    found = fetch_folder(shipped.hash, tmp_path / "cache", read)
    wanted = content(tmp_path / "from")
    del wanted["__pycache__/x.pyc"]
    assert content(found) == wanted
    count = len(asked)
    assert fetch_folder(shipped.hash, tmp_path / "cache", read) == found
    assert len(asked) == count
    assert ShippedFolder(tmp_path / "from").hash == shipped.hash
    (tmp_path / "from" / "model.py").write_text("class Model: pass")
    assert ShippedFolder(tmp_path / "from").hash != shipped.hash


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_a_file_that_changes_on_its_way_is_refused(tmp_path: Path, change: str) -> None:
    shipped = make(tmp_path / "from")
    large = tmp_path / "from" / "a" / "b" / "large"
    data = large.read_bytes()
    large.write_bytes({"longer": data + b"x", "shorter": data[:-1], "other": b"x" + data[1:]}[change])
    cache = tmp_path / "cache"
    with pytest.raises(ProtocolFault, match="changed meanwhile"):
        fetch_folder(shipped.hash, cache, shipped.read)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "a/../../x", "a//b", "./x", "a/", "..", ".", "a\\b", "a\0b", ""]
)
def test_a_path_outside_of_its_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ProtocolFault):
        check_path(path)
    listed = msgspec.json.encode([ShippedFile(path, 0, hashlib.sha256().hexdigest())])

    def read(asked: FileRequest) -> bytes:
        return listed[asked.at :] if asked.file < 0 else b""

    with pytest.raises(ProtocolFault):
        fetch_folder(hashlib.sha256(listed).hexdigest(), tmp_path / "cache", read)
    assert not (tmp_path / "x").exists()


def test_a_list_of_another_hash_is_refused(tmp_path: Path) -> None:
    shipped = make(tmp_path / "from")
    with pytest.raises(ProtocolFault, match="not the one that was announced"):
        fetch_folder("0" * 64, tmp_path / "cache", shipped.read)
    with pytest.raises(ProtocolFault, match="a hash that is none"):
        fetch_folder("../" + "0" * 61, tmp_path / "cache", shipped.read)


def test_a_question_for_a_file_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolFault):
        make(tmp_path / "from").read(FileRequest(3))
