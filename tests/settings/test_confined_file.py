"""The one reader of files that a config names: what it gives, and what it never opens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastserve.errors import ConfigError
from fastserve.settings.confined_file import read_confined


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, a file beside it, and links of every kind."""
    made = tmp_path / "model"
    (made / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "x").write_text("secret")
    (made / "x").write_text("own")
    (made / "deep" / "y").write_text("deep")
    (made / "again").symlink_to("deep/y")
    (made / "lower").symlink_to(made / "deep")
    (made / "out").symlink_to("../secret")
    (made / "away").symlink_to("/etc/passwd")
    (made / "down").symlink_to("../beside")
    (made / "zero").symlink_to("/dev/zero")
    (made / "self").symlink_to("self")
    os.mkfifo(made / "pipe")
    return made


@pytest.mark.parametrize(
    ("name", "data"),
    [("x", b"own"), ("deep/y", b"deep"), ("again", b"deep"), ("lower/y", b"deep"), ("./x", b"own")],
)
def test_what_is_inside_is_read(folder: Path, name: str, data: bytes) -> None:
    assert read_confined(folder, name, 4) == data


def test_a_folder_that_is_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(folder)
    assert read_confined(tmp_path / "other", "x", 3) == b"own"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "../secret", "deep/../x", "deep/../../secret", "/etc/passwd", "/dev/zero", "x\0y",
     "out", "away", "down/x", "zero", "/proc/self/environ"],
)  # fmt: skip
def test_what_leads_out_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="leads out of its folder"):
        read_confined(folder, name, 1 << 20)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pipe", "not a regular file"),
        ("deep", "not a regular file"),
        ("none", "No such file or directory"),
        ("x/y", "cannot be read"),
        ("self", "cannot be read|leads out"),
        ("a" * 5000, "File name too long"),
    ],
)
def test_what_is_no_file_is_refused(folder: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as told:
        read_confined(folder, name, 1 << 20)
    assert str(folder) not in str(told.value)


def test_more_than_the_bound_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'x': larger than 2 bytes"):
        read_confined(folder, "x", 2)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):  # says it has 0 bytes
        read_confined(Path("/proc/self"), "status", 10)


def test_a_link_made_after_the_look_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is good when it is resolved, and leads out when it is opened."""
    resolve = os.path.realpath

    def swap(path: os.PathLike[str] | str) -> str:
        found = resolve(path)
        if Path(path).name == "y" and not (folder / "deep").is_symlink():
            (folder / "deep").rename(folder / "gone")
            (folder / "deep").symlink_to("/etc")
        return found

    monkeypatch.setattr(os.path, "realpath", swap)
    with pytest.raises(ConfigError, match=r"leads out of its folder|cannot be read"):
        read_confined(folder, "deep/y", 1 << 20)
