"""Request targets and the places they name: what is one resource and what is not (hardening list H7)."""

from __future__ import annotations

import pytest

from tests.wire.kit import Pipe, echo


@pytest.mark.parametrize(
    "target", [b"http://host/echo", b"HTTPS://host:1/echo", b"/echo", b"/echo?x", b"/echo#f"]
)
def test_absolute_form_is_the_same_resource(target: bytes) -> None:
    pipe = Pipe({"/echo": echo, "/echo#f": echo})
    pipe.feed(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert pipe.replies()[0].body.startswith(b"GET /echo")


@pytest.mark.parametrize(
    "authority",
    [
        *(b"a", b"a:", b"a:80", b"A-1.example:65535", b"127.0.0.1:8000", b"[::1]", b"[::1]:80", b"a%20b"),
        *(b"[fe80::1%eth0]:1", b"[fe80::1%25eth0]", b"[v1.a:b]", b"a_b", b"xn--bcher-kva.example"),
    ],
)
def test_places_a_client_may_name(authority: bytes) -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(b"GET http://%b/echo HTTP/1.1\r\nHost: %b\r\n\r\n" % (authority, authority))
    pipe.feed(b"GET /echo HTTP/1.1\r\nHost:\r\n\r\n")
    assert [r.body for r in pipe.replies()] == [b"GET /echo "] * 2


@pytest.mark.parametrize(
    "target", ["//echo", "/./echo", "/%65cho", "/Echo", "/echo;a", "/echo/", "/echo%00", "/echo%c0%af"]
)
def test_targets_are_neither_decoded_nor_folded(target: str) -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert [r.status for r in pipe.replies()] == [404]
