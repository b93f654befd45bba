"""Warnings at the start about an address that others can reach."""

from __future__ import annotations

from typing import Any

import pytest

from fastserve.errors import ConfigError
from fastserve.server import dialect_selection
from fastserve.server.dialect_selection import (
    is_public,
    list_exposures,
    list_open_places,
    refuse_open_places,
)
from fastserve.settings import AdminOptions, Listener, Settings, TlsOptions
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
    served = "127.0.0.1:0: whoever comes is served, nobody needs a key; see docs/security.md"
    assert caplog.messages.count(served) == 1
    assert "whoever reaches 127.0.0.1:0 may load and unload models" in caplog.text


CA = TlsOptions(cert="c.pem", key="k.pem", client_ca="ca.pem")


def test_who_needs_no_key() -> None:
    assert list_open_places(settings("127.0.0.1:1", "localhost:2", "[::1]:3", "unix:/run/a.sock")) == []
    assert list_open_places(settings("127.0.0.1:1", ":2", "10.0.0.7:3", ":2")) == [":2", "10.0.0.7:3"]
    assert list_open_places(Settings(http=(), grpc=(), listen=(Listener("[::]:4"),))) == ["[::]:4"]
    assert list_open_places(settings("h:1", metrics_port=8002)) == ["h:1", "h:8002"]  # a dialect's own port
    assert list_open_places(settings(":2", keys="keys.yaml")) == []
    assert list_open_places(settings(":2", tls=CA)) == []
    assert list_open_places(settings(":2", tls=TlsOptions(cert="c.pem", key="k.pem"))) == [":2"]
    optional = TlsOptions(cert="c.pem", key="k.pem", client_ca="ca.pem", client_auth="optional")
    assert list_open_places(settings(":2", tls=optional)) == [":2"]
    plain = Settings(http=(Listener(":1"), Listener(":2", tls=False)), grpc=(), tls=CA)
    assert list_open_places(plain) == [":2"]


def test_strangers_are_served_only_where_somebody_says_so() -> None:
    refuse_open_places(settings(":1", insecure_public=True))
    refuse_open_places(settings("127.0.0.1:1"))
    with pytest.raises(ConfigError) as caught:
        refuse_open_places(settings("127.0.0.1:1", ":2", ":3"))
    assert str(caught.value) == (
        ":2, :3: other machines may reach this, and nobody needs a key. Give --keys FILE (`fastserve key new "
        "NAME --file FILE` makes one), --tls-client-ca FILE, or an address of this machine alone (127.0.0.1, "
        "unix:PATH); --insecure-public serves whoever comes"
    )
