"""Asks a running server over TF Serving's REST API, one blocking request at a time.

For commands a person types. The load generator has its own connections.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import click

from fastserve.cli.trust import Trust

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0

url_option = click.option(
    "--url", default=DEFAULT_URL, show_default=True, envvar="FASTSERVE_URL", help="The server's HTTP address."
)


class Server:
    """A server at `url` (scheme, host and port). Failures are click errors in plain words."""

    def __init__(self, url: str, trust: Trust | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self.trust = trust or Trust()
        self._context = self.trust.context() if self.url.startswith("https://") else None

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """GET, or POST when there is a body. Raises ClickException on any status but 200."""
        status, answer = self.exchange(path, body, content_type, headers)
        if status == 404:
            known = sorted(self.readiness()["models"])
            has = f"; the server has {', '.join(known)}" if known else "; the server has no model"
            raise click.ClickException(f"404: {error_text(answer)}{has}")
        if status != 200:
            raise click.ClickException(f"{status}: {error_text(answer)}")
        return answer

    def exchange(
        self, path: str, body: bytes | None, content_type: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """(status, body) of the reply, whatever the status. Raises ClickException when there is none."""
        sent = {} if body is None else {"Content-Type": content_type, **(headers or {})}
        try:
            request = urllib.request.Request(self.url + path, body, sent)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as fault:
            return fault.code, fault.read()
        except (OSError, ValueError) as fault:
            reason = fault.reason if isinstance(fault, urllib.error.URLError) else fault
            raise click.ClickException(f"cannot ask {self.url}: {reason}. Is the server running?") from None

    def events(self, path: str, body: bytes) -> Iterator[bytes]:
        """The data of server-sent events as they come. Raises ClickException on any status but 200, and when
        the connection breaks."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as reply:
                for line in reply:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
        except urllib.error.HTTPError as fault:
            raise click.ClickException(f"{fault.code}: {error_text(fault.read())}") from None
        except (OSError, ValueError, http.client.HTTPException) as fault:
            reason = fault.reason if isinstance(fault, urllib.error.URLError) else fault
            raise click.ClickException(f"cannot ask {self.url}: {reason}. Is the server running?") from None

    def status(self, model: str) -> list[dict[str, Any]]:
        """Every version of a model with its state, highest first; none when no version was ever tried."""
        status, answer = self.exchange(model_path(model), None, "")
        if status == 404:
            return []
        if status != 200:
            raise click.ClickException(f"{status}: {error_text(answer)}")
        found: list[dict[str, Any]] = json.loads(answer)["model_version_status"]
        return found

    def signatures(self, model: str) -> dict[str, Any]:
        """The signatures of the model's newest version, as TF Serving's metadata call spells them."""
        metadata = json.loads(self.ask(f"{model_path(model)}/metadata"))
        found: dict[str, Any] = metadata["metadata"]["signature_def"]["signature_def"]
        return found

    def readiness(self) -> dict[str, Any]:
        """The body of /healthz/ready: `ready`, `reason`, and `models` by name."""
        status, answer = self.exchange("/healthz/ready", None, "")
        if status not in (200, 503):
            raise click.ClickException(f"{status}: {error_text(answer)}")
        found: dict[str, Any] = json.loads(answer)
        return found


def model_path(model: str, version: int | None = None, label: str | None = None) -> str:
    path = f"/v1/models/{quote(model, safe='')}"
    if version is not None:
        return f"{path}/versions/{version}"
    return f"{path}/labels/{quote(label, safe='')}" if label else path


def error_text(body: bytes) -> str:
    """The message of an error body, whatever its form."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip() or "no reason given"
    found = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(found.get("message", found) if isinstance(found, dict) else found)
