"""Captured answers this server gives differently on purpose: id -> what it answers instead, and why."""

from __future__ import annotations

from typing import Any

DEVIATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "v2-http-012": (
        {"status": 405, "body_raw": ""},
        "a reply to HEAD has no body (RFC 9110 9.3.2): what the captured server sends would be taken "
        "for the beginning of the next reply",
    ),
    "v2-http-118": (
        {"status": 400, "body": {"error": "Unable to parse Inference-Header-Content-Length, got: abc"}},
        "later releases say so; the captured one took the text for 0",
    ),
    "v2-http-223": (
        {"status": 400, "body": {"error": "Invalid value for 'ready': expected a boolean"}},
        "later releases say so",
    ),
    "v2-http-252": (
        {"status": 400, "body": {"error": "failed to register shared memory region 'q': invalid args"}},
        "a range beyond the file; the captured release tripped over a second region on the same key",
    ),
    "v2-http-253": (
        {
            "status": 400,
            "body": {
                "error": "failed to register shared memory region 'q': unable to process address space"
                "Invalid argument"
            },
        },
        "an offset that is no whole page; the captured release tripped over a second region on the same key",
    ),
}
