"""Request targets: which places they name (hardening list H7), and who answers for what is nobody's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fastserve.net import Call, Endpoint, Route
from fastserve.net.access_control import FROM_A_PAGE, Opening, Scope
from fastserve.net.limits import UnknownMethod
from fastserve.net.router import CachedRoute, Router, Yields
from tests.net.kit import Paths, Pipe, echo


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


@pytest.mark.parametrize("place", [b"http://", b"https://", b"http://:80", b"http://a@"])
@pytest.mark.parametrize("rest", [b"/echo", b"?x", b""])
def test_an_absolute_form_names_a_place(place: bytes, rest: bytes) -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(b"GET " + place + rest + b" HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [r.status for r in pipe.replies()] == [400]


@pytest.mark.parametrize(
    "target", ["//echo", "/./echo", "/%65cho", "/Echo", "/echo;a", "/echo/", "/echo%00", "/echo%c0%af"]
)
def test_targets_are_neither_decoded_nor_folded(target: str) -> None:
    pipe = Pipe({"/echo": echo})
    pipe.feed(f"GET {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert [r.status for r in pipe.replies()] == [404]


class Told(Paths):
    """With words of its own for what is nobody's."""

    def answer_unknown(self, call: Call) -> None:
        call.reply(404, b"mine", b"text/plain")

    def route_unknown(self, method: str, target: str) -> Endpoint | None:
        return None if method == "BAR" else self.answer_unknown


@pytest.mark.parametrize(
    ("dialects", "words"),
    [
        ([Told({})], b"mine"),
        ([Paths({}), Told({})], b"mine"),
        ([Told({}), Told({})], b""),
        ([Paths({})], b""),
        ([], b""),
    ],
)
def test_words_for_what_is_nobodys_are_those_of_the_one_that_has_some(
    dialects: list[Paths], words: bytes
) -> None:
    router = Router(dialects)
    endpoint, found = router.find("GET", "/nowhere")
    assert found is None  # never remembered
    plain = b'{"error":"no API of this listener has this path"}'
    assert answer_of(endpoint) == (404, words or plain)
    plain = b'{"error":"the method FOO is not implemented"}'
    foo = answer_of(lambda call: router.refuse(call, UnknownMethod("FOO", "/nowhere")))
    assert foo == ((404, words) if words else (501, plain))
    bar = answer_of(lambda call: router.refuse(call, UnknownMethod("BAR", "/nowhere")))
    assert bar == (501, plain.replace(b"FOO", b"BAR"))


class Yielding(Paths):
    """With a route for everything, that gives way."""

    def route(self, method: str, target: str) -> Route | None:
        return Route(self.answer, Scope.METADATA, Yields.FIRST)

    def answer(self, call: Call) -> None:
        call.reply(200, b"yielded", b"text/plain")


class Owning(Yielding):
    """With one path of its own."""

    def route(self, method: str, target: str) -> Route | None:
        return Route(echo, Scope.METADATA) if target == "/own" else None


class CatchingAll(Yielding):
    """With a refusal for everything that nobody has."""

    def route(self, method: str, target: str) -> Route | None:
        return Route(self.answer, Scope.METADATA, Yields.LAST)

    def answer(self, call: Call) -> None:
        call.reply(200, b"caught", b"text/plain")


@pytest.mark.parametrize("order", [1, -1])
def test_a_route_that_gives_way_is_taken_where_no_other_has_one(order: int) -> None:
    router = Router([Yielding({}), Owning({})][::order])
    assert answer_of(router.find("GET", "/own")[0]) == (200, b"GET / ")
    assert answer_of(router.find("GET", "/other")[0]) == (200, b"yielded")


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_catch_all_gives_way_to_all_others(order: tuple[int, ...]) -> None:
    class Sharing(Yielding):
        def route(self, method: str, target: str) -> Route | None:
            return super().route(method, target) if target == "/shared" else None

    dialects = [CatchingAll({}), Sharing({}), Owning({})]
    router = Router([dialects[place] for place in order])
    assert answer_of(router.find("GET", "/own")[0]) == (200, b"GET / ")
    assert answer_of(router.find("GET", "/shared")[0]) == (200, b"yielded")
    assert answer_of(router.find("GET", "/other")[0]) == (200, b"caught")


def test_of_routes_that_all_give_way_the_first_is_taken() -> None:
    class Second(Yielding):
        def answer(self, call: Call) -> None:
            call.reply(200, b"second", b"text/plain")

    assert answer_of(Router([Second({}), Yielding({})]).find("GET", "/x")[0]) == (200, b"second")


def answer_of(endpoint: Callable[[Call], object]) -> tuple[int, bytes]:
    """Return an endpoint's answer on a connection of its own."""
    pipe = Pipe({"/": endpoint})  # type: ignore[dict-item]
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    (reply,) = pipe.replies()
    return reply.status, reply.body


def test_the_memory_of_routes_holds_what_was_found_and_not_what_a_head_was_given() -> None:
    """An endpoint that stands in for one connection or call never answers another one's."""
    pipe = Pipe({"/": lambda call: replace(call)})

    def replace(call: Call) -> None:
        call.head.endpoint = lambda call: call.reply(500, b"of another client")
        call.reply(200, b"mine", b"text/plain")

    router = pipe.listener.router
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [reply.body for reply in pipe.replies()] == [b"mine"]
    endpoint, found = router.find("GET", "/")
    assert found is None
    assert answer_of(endpoint) == (200, b"mine")
    (kept,) = router._remembered.values()
    assert (type(kept), kept.endpoint) == (CachedRoute, endpoint)


@pytest.mark.parametrize("scope", Scope)
def test_what_a_scope_asks_for_is_seen_to_for_every_dialect(scope: Scope) -> None:
    class One(Paths):
        def route(self, method: str, target: str) -> Route | None:
            return Route(echo, scope)

    opening = Opening(done=False)
    endpoint, _ = Router([One({})], opening).find("GET", "/")
    at_once = scope in (Scope.HEALTH, Scope.METRICS)
    assert answer_of(endpoint) == (
        (200, b"GET / ") if at_once else (503, b"The server is starting: its models are loading")
    )
    opening.list_models()
    assert answer_of(endpoint)[0] == (503 if scope is Scope.ADMIN else 200)
    opening.finish()
    assert answer_of(endpoint) == (200, b"GET / ")
    pipe = Pipe({"/": Router([One({})], opening).find("GET", "/")[0]})
    pipe.feed(b"GET / HTTP/1.1\r\nHost: a\r\nOrigin: http://evil.example\r\n\r\n")
    assert pipe.replies()[0].body == (FROM_A_PAGE.encode() if scope is Scope.ADMIN else b"GET / ")
