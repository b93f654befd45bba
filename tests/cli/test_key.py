"""`fastserve key`: what it writes, what it refuses to write, and two of it at once."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fastserve.cli import main
from fastserve.errors import ConfigError
from fastserve.settings import key_file
from fastserve.settings.config_files import parse_yaml
from fastserve.settings.key_file import KEY, KeyFileReader, changing, make_key, read_keys


def key(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["key", *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_key_is_printed_once_as_the_last_word(path: Path) -> None:
    said = key("new", "search", "--scopes", "infer, metadata,infer", "--file", str(path))
    text = said.split()[-1]
    assert KEY.fullmatch(text.encode())
    (entry,) = read_keys(path).keys
    assert entry.scopes == ("metadata", "infer")
    assert entry.fits(text.encode())
    assert not entry.fits(text[:-1].encode() + b"!")
    written = path.read_text()
    assert text not in written
    assert text.split("_", 2)[2] not in written
    listed = key("list", "--file", str(path))
    assert listed == f"search  metadata,infer  id {entry.id}  expires never\n"


def test_equal_keys_have_different_hashes(path: Path) -> None:
    for name in ("a", "b"):
        key("new", name, "--file", str(path))
    one, other = read_keys(path).keys
    assert one.hash[:32] != other.hash[:32]
    assert one.id != other.id


def test_a_file_is_its_owners_alone_and_whole(path: Path) -> None:
    key("new", "a", "--file", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    was = path.stat().st_ino
    key("new", "b", "--file", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_ino != was  # replaced, not written over
    assert [child.name for child in path.parent.iterdir()] == ["keys.yaml"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    key("new", "a", "--file", str(real))
    link.symlink_to(real)
    key("new", "b", "--file", str(link))
    assert link.is_symlink()
    assert [entry.name for entry in read_keys(real).keys] == ["a", "b"]


def test_many_at_once_lose_nothing(path: Path) -> None:
    command = [sys.executable, "-m", "fastserve.cli", "key", "new", "--file", str(path)]
    started = [subprocess.Popen([*command, f"n{number}"], stdout=subprocess.DEVNULL) for number in range(6)]
    assert [process.wait(60) for process in started] == [0] * 6
    assert {entry.name for entry in read_keys(path).keys} == {f"n{number}" for number in range(6)}


def test_a_change_that_fails_writes_nothing(path: Path) -> None:
    key("new", "a", "--file", str(path))
    was = path.read_bytes()

    def fail() -> None:
        with changing(path) as entries:
            entries.clear()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == was
    assert "there is a key of the name a" in key("new", "a", "--file", str(path), status=1)
    assert "there is no key of the name b" in key("revoke", "b", "--file", str(path), status=1)
    assert path.read_bytes() == was


def test_a_revoked_key_is_gone(path: Path) -> None:
    key("new", "a", "--file", str(path))
    key("new", "b", "--file", str(path))
    assert key("revoke", "a", "--file", str(path)) == "a has no key any more\n"
    assert [entry.name for entry in read_keys(path).keys] == ["b"]
    key("revoke", "b", "--file", str(path))
    assert read_keys(path).keys == ()


def test_expiry_is_a_date_or_a_duration(path: Path) -> None:
    key("new", "date", "--expires", "2099-01-31", "--file", str(path))
    key("new", "days", "--expires", "90d", "--file", str(path))
    key("new", "past", "--expires", "2001-01-31T12:00:00+02:00", "--file", str(path))
    date, days, past = read_keys(path).keys
    assert (date.expires, past.expires) == ("2099-01-31T00:00:00Z", "2001-01-31T10:00:00Z")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", days.expires)
    assert key("list", "--file", str(path)).splitlines()[2].endswith("2001-01-31T10:00:00Z  expired")
    for wrong in ("tomorrow", "90", "1y", "-1d"):
        assert "expires: given" in key("new", "x", f"--expires={wrong}", "--file", str(path), status=1)


@pytest.mark.parametrize("scopes", ["", "all", "infer,root"])
def test_unknown_scopes(path: Path, scopes: str) -> None:
    said = key("new", "a", "--scopes", scopes, "--file", str(path), status=2)
    assert "allowed: health, metadata, metrics, infer, admin" in said
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 65, "a: b"])
def test_names_that_are_none(path: Path, name: str) -> None:
    key("new", name, "--file", str(path), status=1)
    assert not path.exists()


def test_a_file_that_cannot_be_used_is_not_written(path: Path) -> None:
    path.write_text("keys: [\n")
    said = key("new", "a", "--file", str(path), status=1)
    assert "not readable as YAML" in said
    assert "Traceback" not in said
    assert path.read_text() == "keys: [\n"
    assert "cannot be read" in key("list", "--file", str(path.with_name("none")), status=1)
    assert "No such file" in key("new", "a", "--file", str(path.parent / "no" / "keys"), status=1)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("keys: []\nrates: {}\n", "rates"),
        (
            "keys:\n- {name: a, scopes: [infer]}\n",
            "id, hash, subject: allowed: id and hash, or subject alone",
        ),
        ("keys:\n- {name: a, scopes: [], subject: CN=a}\n", "scopes"),
        ("keys:\n- {name: a, scopes: [infer], subject: CN=a, rates: 1}\n", "rates"),
        ("keys:\n- {name: a, scopes: [infer], subject: CN=a, expires: soon}\n", "expires: given"),
        (
            "keys: [{name: a, scopes: [infer], subject: CN=a}, {name: b, scopes: [infer], subject: CN=a}]\n",
            'given subject "CN=a" twice',
        ),
    ],
)
def test_a_file_says_what_is_wrong(path: Path, written: str, said: str) -> None:
    path.write_text(written)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_keys(path)


def test_models(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    said = key("new", "a", "--models", "team-a-*, shared,shared", "--file", str(path))
    assert said.startswith("a may metadata, infer of team-a-*, shared. Its key")
    assert read_keys(path).keys[0].models == ("team-a-*", "shared")
    assert "  models team-a-*,shared  " in key("list", "--file", str(path))
    key("new", "b", "--file", str(path))  # the file is written anew, as it was
    assert read_keys(path).keys[0].models == ("team-a-*", "shared")
    said = key("new", "c", "--models", "x", "--scopes", "infer,admin", "--file", str(path), status=1)
    assert "models: given with the scope admin" in said


def test_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key("new", "a", "--requests-per-second", "2.5", "--concurrency", "8", "--file", str(path))
    (entry,) = read_keys(path).keys
    assert (entry.requests_per_second, entry.concurrency) == (2.5, 8)
    assert "  2.5 requests/s  8 under way  " in key("list", "--file", str(path))
    key("new", "b", "--file", str(path))
    assert read_keys(path).keys[0] == entry
    key("new", "c", "--concurrency", "-1", "--file", str(path), status=2)


def test_a_file_as_it_is_written_is_read_as_yaml_would_be(path: Path) -> None:
    """The quick reader of the server, which serves meanwhile, and files that it leaves to YAML."""
    with changing(path) as entries:
        for number, more in enumerate(
            (
                {},
                {
                    "models": ("a-*", "b:é\\"),
                },
                {"requests_per_second": 2.5},
                {"concurrency": 3},
            )
        ):
            entries.append(make_key(f"k{number}", ("infer", "health"), "2030-01-31", **more)[1])
    text = path.read_text()
    quick = key_file._read_as_written(text)
    assert quick is not None
    assert quick == parse_yaml(text, "keys")
    assert [entry.name for entry in read_keys(path).keys] == [f"k{number}" for number in range(4)]
    for other in (
        text.replace('"k1"', "k1"),
        "x: 1\n" + text,
        text.replace("  id:", "  name:", 1),
        "keys: []\n",
    ):
        assert key_file._read_as_written(other) is None
    path.write_text(text.replace("  id:", "  name:", 1))
    with pytest.raises(ConfigError, match="given twice"):
        read_keys(path)


def test_entries_that_stay_are_read_once(path: Path) -> None:
    """A server reads the file while it serves: a change of one key costs the same beside many others."""
    with changing(path) as entries:
        for number in range(5):
            entries.append(make_key(f"k{number}", ("infer",))[1])
    reader = KeyFileReader(path)
    before = reader.read().keys
    with changing(path) as entries:
        entries[2] = make_key("k2", ("infer", "health"))[1]
        del entries[3]
        entries.append(make_key("new", ("infer",))[1])
    after = reader.read().keys
    assert after == read_keys(path).keys
    assert [entry.name for entry in after] == ["k0", "k1", "k2", "k4", "new"]
    assert [any(entry is one for one in before) for entry in after] == [True, True, False, True, False]
    text = path.read_text()
    first = text.index("- name")
    path.write_text(text + text[first : text.index("- name", first + 1)])
    with pytest.raises(ConfigError, match='name "k0" twice'):
        reader.read()
    path.write_text(text.replace('"infer"', '"infr"', 1))
    with pytest.raises(ConfigError, match=r"scopes.*infr"):
        reader.read()
    path.write_text(text)
    assert [any(entry is one for one in after) for entry in reader.read().keys] == [True] * 5
