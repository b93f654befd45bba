"""What a route lets its caller do, and who may use those that administer the server. No dialect's words.

Every route of every dialect is in one scope. Calls in ADMIN change what is served, for everybody: a page of
some web site, open in a browser that can reach this server, must not make them. Browsers say where a POST
comes from (`Origin`, `Sec-Fetch-Site`) and let pages send no other site a body of JSON without asking it
first, which is never answered here; other clients say nothing, and are not asked to.

    Origin: http://evil.example        refused, and so is `null`
    Origin: http://10.0.0.7:8000       taken if that is the Host the call came to, and its body is JSON
    Origin: http://models.corp:8000    refused: by DNS rebinding any name leads here; see `admin.origins`
    (none)                             taken
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from fastserve.errors import Kind, ServeError

if TYPE_CHECKING:
    from fastserve.wire.call import Call, Endpoint

Refuse = Callable[["Call", ServeError], None]
FROM_A_PAGE = "this call is refused to web pages of another site (admin.origins)"
NOT_JSON = "this call is refused to web pages unless its Content-Type is application/json"


class Scope(Enum):
    """What a route is about."""

    HEALTH = "health"
    METADATA = "metadata"
    METRICS = "metrics"
    INFER = "infer"
    ADMIN = "admin"


class Guarded:
    """An endpoint in the scope ADMIN."""

    __slots__ = ("_endpoint", "_origins", "_refuse")

    def __init__(self, endpoint: Endpoint, origins: Sequence[str], refuse: Refuse) -> None:
        self._endpoint = endpoint
        self._origins = origins
        self._refuse = refuse

    def __call__(self, call: Call) -> Coroutine[Any, Any, None] | None:
        fault = find_fault(call.header, self._origins)
        if fault:
            self._refuse(call, ServeError(Kind.PERMISSION_DENIED, fault))
            return None
        return self._endpoint(call)


def guard(endpoint: Endpoint, scope: Scope, origins: Sequence[str], refuse: Refuse) -> Endpoint:
    """The endpoint, held back from web pages where it administers; `refuse` answers in a dialect's form."""
    return Guarded(endpoint, origins, refuse) if scope is Scope.ADMIN else endpoint


def find_fault(header: Callable[[bytes], bytes], origins: Sequence[str]) -> str:
    """Why a call is refused, "" when it is not. `header` gives one by its lower-case name, b"" for none."""
    origin = header(b"origin").decode("latin-1").strip().lower()
    if origin in origins and origin:
        return "" if _is_json(header(b"content-type")) else NOT_JSON
    if header(b"sec-fetch-site").strip().lower() not in (b"", b"none", b"same-origin"):
        return FROM_A_PAGE
    if not origin:
        return ""
    host = _authority(header(b"host").decode("latin-1").strip().lower())
    if _authority(origin.partition("://")[2]) != host or not _is_literal(host):
        return FROM_A_PAGE
    return "" if _is_json(header(b"content-type")) else NOT_JSON


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _authority(text: str) -> str:
    """HOST:PORT without the port that goes without saying."""
    return text.removesuffix(":80").removesuffix(":443")


def _is_literal(authority: str) -> bool:
    """Whether no name server has a say in where this leads."""
    host = authority.partition("]")[0].lstrip("[") if "[" in authority else authority.partition(":")[0]
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
