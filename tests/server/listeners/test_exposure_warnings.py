"""Warnings at the start about an address that others can reach."""

from __future__ import annotations

from typing import Any

import pytest

from fastserve.server import dialect_selection
from fastserve.server.dialect_selection import is_public, list_exposures
from fastserve.settings import AdminOptions, Listener, Settings
from tests.server.rig import run, serving, write_model


def settings(*addresses: str, **changes: Any) -> Settings:
    http = tuple(Listener(*address.split("=")[:1], tuple(address.split("=")[1:])) for address in addresses)
    return Settings(http=http, grpc=(), **changes)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"])
def test_addresses_of_this_machine(address: str) -> None:
    assert not is_public(Listener(address))


@pytest.mark.parametrize(
    "address", [":1", "0.0.0.0:1", "[::]:1", "10.0.0.7:1", "models.corp:1", "[fe80::1]:1"]
)
def test_addresses_of_others(address: str) -> None:
    assert is_public(Listener(address))


def test_what_is_said() -> None:
    everything = {
        "model_control": "explicit",
        "allow_client_shm": True,
        "admin": AdminOptions(file_overrides=True, log_settings=True),
    }
    assert list_exposures(settings("127.0.0.1:1", **everything)) == []
    assert list_exposures(settings("0.0.0.0:1")) == []
    assert list_exposures(settings("0.0.0.0:1", keys="keys.yaml", **everything)) == []
    assert list_exposures(settings("0.0.0.0:1=tfserving", **everything)) == []
    reload = AdminOptions(reload_config=True)
    assert list_exposures(Settings(http=(), grpc=(Listener("0.0.0.0:1", ("tfserving",)),), admin=reload)) == [
        "whoever reaches 0.0.0.0:1 may replace the models, and so run code of its own: there are no keys; "
        "see docs/security.md"
    ]
    assert "may take it offline" in list_exposures(settings("0.0.0.0:1=grps"))[0]
    assert list_exposures(settings("0.0.0.0:1", model_control="explicit")) == [
        "whoever reaches 0.0.0.0:1 may load and unload models: there are no keys; see docs/security.md"
    ]
    told = list_exposures(settings("127.0.0.1:1", ":2", "[::]:3=triton_v1", **everything))
    assert [text.split(" may ")[0] for text in told] == ["whoever reaches :2, [::]:3"] * 4
    told = list_exposures(Settings(http=(), grpc=(Listener("0.0.0.0:4"),), **everything))
    assert [text.split(" may ")[0] for text in told] == ["whoever reaches 0.0.0.0:4"] * 4


def test_it_is_said_at_the_start(tmp_path, caplog, monkeypatch) -> None:
    """As if the test's own address were public."""
    monkeypatch.setattr(dialect_selection, "is_public", lambda listener: True)
    write_model(tmp_path, "first")

    async def work() -> None:
        async with serving(tmp_path):
            pass

    run(work())
    assert "whoever reaches 127.0.0.1:0 may load and unload models" in caplog.text
