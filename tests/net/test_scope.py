"""Access to routes that administer: the origin of a call as browsers tell it."""

from __future__ import annotations

import pytest

from fastserve.net.access_control import FROM_A_PAGE, NOT_JSON, find_fault

JSON = "application/json"
HERE = "127.0.0.1:8000"


def ask(origins: tuple[str, ...] = (), **headers: str) -> str:
    given = {"host": HERE, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return find_fault(lambda name: given.get(name.decode(), "").encode(), origins)


@pytest.mark.parametrize("content_type", ["", JSON, "text/plain", "application/x-www-form-urlencoded"])
def test_what_is_no_browser_says_nothing_and_is_taken(content_type: str) -> None:
    assert ask(content_type=content_type) == ""
    assert ask(content_type=content_type, sec_fetch_site="none") == ""


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8000", HERE),
        ("http://localhost:8000", "LOCALHOST:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("HTTP://10.0.0.7", "10.0.0.7:80"),
        ("https://10.0.0.7", "10.0.0.7"),
    ],
)
def test_a_page_of_the_server_itself(origin: str, host: str) -> None:
    assert ask(origin=origin, host=host, content_type=f"{JSON}; charset=utf-8") == ""
    assert ask(origin=origin, host=host, content_type=JSON, sec_fetch_site="same-origin") == ""
    for content_type in ("", "text/plain", "application/json-patch+json", "text/plain;application/json"):
        assert ask(origin=origin, host=host, content_type=content_type) == NOT_JSON


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://evil.example", HERE),
        ("http://127.0.0.1:9000", HERE),
        ("http://127.0.0.1", HERE),
        ("null", HERE),
        ("null", "null"),
        ("http://evil.example:8000", "evil.example:8000"),  # its name leads here now
        ("http://127.0.0.1.evil.example:8000", "127.0.0.1.evil.example:8000"),
        ("http://[::1.evil]:8000", "[::1.evil]:8000"),
        ("http://localhost.evil.example", "localhost.evil.example"),
        ("http://", ""),
        ("http://127.0.0.1:8000@evil.example", HERE),
    ],
)
def test_any_other_page(origin: str, host: str) -> None:
    assert ask(origin=origin, host=host, content_type=JSON) == FROM_A_PAGE


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE", "new-word"])
def test_what_the_browser_itself_says(site: str) -> None:
    assert ask(sec_fetch_site=site) == FROM_A_PAGE
    assert ask(sec_fetch_site=site, origin=f"http://{HERE}", content_type=JSON) == FROM_A_PAGE


def test_sites_the_server_was_told_of() -> None:
    told = ("https://models.example",)
    good = {"origin": "https://models.example", "sec_fetch_site": "cross-site"}
    assert ask(told, content_type=JSON, **good) == ""
    assert ask(told, content_type="text/plain", **good) == NOT_JSON
    assert ask(told, origin="https://models.example.evil", content_type=JSON) == FROM_A_PAGE
