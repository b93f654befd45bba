"""Files of the pages that a listener shows of itself: the operator's console, and /docs.

    files = PageFiles({"/console": "console.html", "/console/console.css": "console.css"}, HEADERS)
    files.endpoints["/console"]        replies with page/console.html

A page loads nothing from other servers: its content security policy forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from fastserve.dialects.admin.probes import PROBE_METHODS

if TYPE_CHECKING:
    from fastserve.net import Call
    from fastserve.net.request import Endpoint

Headers = Sequence[tuple[bytes, bytes]]
PAGE_METHODS = PROBE_METHODS
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
}


def page_headers(*policies: str) -> Headers:
    """Return the headers of a page's replies; `policies` go beside those which every page has."""
    policy = ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", *policies)
    return (
        (b"Content-Security-Policy", "; ".join((*policy, "base-uri 'none'", "form-action 'none'")).encode()),
        (b"X-Content-Type-Options", b"nosniff"),
        (b"Referrer-Policy", b"no-referrer"),
        (b"Cache-Control", b"no-store"),
    )


class PageFiles:
    """Endpoints of files, by their paths. A file is read when it is first wanted."""

    def __init__(self, names: Mapping[str, str], headers: Headers) -> None:
        self._headers = headers
        self._read: dict[str, bytes] = {}
        self.endpoints: dict[str, Endpoint] = {
            path: partial(self._show, name) for path, name in names.items()
        }

    def _show(self, name: str, call: Call) -> None:
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = (files(__package__) / "page" / name).read_bytes()
        call.reply(200, found, _TYPES[name[name.rindex(".") :]], self._headers)
