"""`fastserve models`, `fastserve infer`, and the client of a running server that other commands use too.

It speaks TF Serving's REST API, one request at a time, with TLS and keys. `models` lists the server's models;
`infer` sends one request and prints its answer.
"""

from __future__ import annotations

import functools
import http.client
import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click
import msgspec

if TYPE_CHECKING:
    import grpc


Command = TypeVar("Command", bound=Callable[..., Any])
READABLE = click.Path(exists=True, dir_okay=False)
API_KEY = "FASTSERVE_API_KEY"


class Trust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a client and its server prove who they are: TLS, by paths of PEM files, and an API key. Without
    `cacert` the machine's authorities count."""

    cacert: str = ""
    insecure: bool = False
    cert: str = ""
    key: str = ""
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request, and the metadata of each call of gRPC, which wants lower case."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for HTTP. Raises ClickException for unreadable files."""
        try:
            context = ssl.create_default_context(cafile=self.cacert or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as fault:
            named = ", ".join(filter(None, (self.cacert, self.cert, self.key)))
            raise click.ClickException(f"{named}: {fault.strerror or fault}") from None
        if self.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for gRPC, whose library always verifies. Raises ClickException."""
        import grpc

        if self.insecure:
            raise click.ClickException("--insecure: not over gRPC, whose library always looks; use --cacert")
        read = [Path(path).read_bytes() if path else None for path in (self.cacert, self.key, self.cert)]
        if self.cert and not self.key:
            read[1] = read[2]
        return grpc.ssl_channel_credentials(*read)

    def channel(
        self, module: Any, address: str, secured: bool, options: Sequence[tuple[str, int]] = ()
    ) -> Any:
        """Return a channel of `grpc` or `grpc.aio`, with TLS where it is `secured`. Raises ClickException."""
        if not secured:
            return module.insecure_channel(address, options=options)
        return module.secure_channel(address, self.credentials(), options=options)


def read_api_key(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """Return a key without the spaces around it. Raises BadParameter, which does not repeat it."""
    key = text.strip()
    if not (key.isascii() and key.isprintable()):
        raise click.BadParameter("it has characters that a header cannot have")
    return key


def with_trust(command: Command) -> Command:
    """Add the options of TLS and of API keys to a command, which is called with `trust`."""

    @functools.wraps(command)
    def called(
        *args: Any,
        cacert: str | None,
        insecure: bool,
        cert: str | None,
        key: str | None,
        api_key: str,
        **options: Any,
    ) -> Any:
        trust = Trust(cacert or "", insecure, cert or "", key or "", api_key)
        return command(*args, trust=trust, **options)

    options = (
        click.option("--cacert", type=READABLE, envvar="FASTSERVE_CACERT", help="Trust these, in PEM."),
        click.option("--insecure", is_flag=True, help="Trust any server (HTTP only)."),
        click.option("--cert", type=READABLE, help="A certificate of this client, in PEM."),
        click.option("--key", type=READABLE, help="Its key, where it is in another file."),
        click.option(
            "--api-key",
            default="",
            envvar=API_KEY,
            show_envvar=True,
            callback=read_api_key,
            metavar="TEXT",
            help="The key that the server asks for.",
        ),
    )
    decorated: Any = called
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0

url_option = click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    envvar="FASTSERVE_URL",
    show_envvar=True,
    help="The server's HTTP address.",
)


class ServerClient:
    """A server at `url` (scheme, host and port). Failures are click errors."""

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
        """Return the reply to GET, or to POST when there is a body.

        Raises ClickException unless it is 200.
        """
        status, answer = self.exchange(path, body, content_type, headers)
        if status == 404:
            known = sorted(self.readiness()["models"])
            has = f"; the server has {', '.join(known)}" if known else "; the server has no model"
            raise click.ClickException(f"404: {error_text(answer)}{has}")
        if status != 200:
            raise refusal(status, answer)
        return answer

    def exchange(
        self, path: str, body: bytes | None, content_type: str, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return (status, body) of the reply. Raises ClickException when there is none."""
        sent = dict(self.trust.headers)
        if body is not None:
            sent |= {"Content-Type": content_type, **(headers or {})}
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
        """Yield the data of server-sent events.

        Raises ClickException unless the status is 200, and on a break.
        """
        headers = {"Content-Type": "application/json", **self.trust.headers}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as reply:
                for line in reply:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
        except urllib.error.HTTPError as fault:
            raise refusal(fault.code, fault.read()) from None
        except (OSError, ValueError, http.client.HTTPException) as fault:
            reason = fault.reason if isinstance(fault, urllib.error.URLError) else fault
            raise click.ClickException(f"cannot ask {self.url}: {reason}. Is the server running?") from None

    def status(self, model: str) -> list[dict[str, Any]]:
        """Return every version of a model with its state, highest first; [] when none was ever tried."""
        status, answer = self.exchange(model_path(model), None, "")
        if status == 404:
            return []
        if status != 200:
            raise refusal(status, answer)
        found: list[dict[str, Any]] = json.loads(answer)["model_version_status"]
        return found

    def signatures(self, model: str) -> dict[str, Any]:
        """Return the signatures of a model's newest version, as in TF Serving's metadata call."""
        metadata = json.loads(self.ask(f"{model_path(model)}/metadata"))
        found: dict[str, Any] = metadata["metadata"]["signature_def"]["signature_def"]
        return found

    def readiness(self) -> dict[str, Any]:
        """Return the body of /healthz/ready: `ready`, `reason`, and `models` by name."""
        status, answer = self.exchange("/healthz/ready", None, "")
        if status not in (200, 503):
            raise refusal(status, answer)
        found: dict[str, Any] = json.loads(answer)
        return found


def model_path(model: str, version: int | None = None, label: str | None = None) -> str:
    path = f"/v1/models/{quote(model, safe='')}"
    if version is not None:
        return f"{path}/versions/{version}"
    return f"{path}/labels/{quote(label, safe='')}" if label else path


def refusal(status: int, body: bytes) -> click.ClickException:
    """Return the error of an answer with another status than 200."""
    how = f"; this command sends the key of --api-key or {API_KEY}" if status == 401 else ""
    return click.ClickException(f"{status}: {error_text(body)}{how}")


def error_text(body: bytes) -> str:
    """Return the message of an error body of any form."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip() or "no reason given"
    found = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(found.get("message", found) if isinstance(found, dict) else found)


HEAD = ("MODEL", "VERSION", "STATE", "WHY")
NEVER = "NOT_LOADED"  # the state of a model none of whose versions was ever tried


def describe(
    server: ServerClient, names: Sequence[str], known: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each version, or one for a model without any; `known` are readiness' models."""
    for name in names:
        versions = server.status(name)
        failed = known.get(name, {}).get("failed")
        for found in versions:
            why = found["status"].get("error_message", "")
            if failed and found["state"] == "AVAILABLE":
                why = f"what the folder has now failed to load, since {failed['since']}: {failed['reason']}"
            yield name, found["version"], found["state"], why
        if not versions and name not in known:
            has = f"; it has {', '.join(sorted(known))}" if known else ""
            raise click.ClickException(f"the server knows no model {name}{has}")
        if not versions:
            yield name, "-", NEVER, known[name].get("reason", "")


def print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@click.command(short_help="List the models of a running server.")
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@url_option
@with_trust
def models(names: tuple[str, ...], as_json: bool, url: str, trust: Trust) -> None:
    """Show every version of the models a server knows, with its state.

    \b
    fastserve models
    fastserve models digits --url http://127.0.0.1:9000
    """
    server = ServerClient(url, trust)
    # TF Serving's API has no call that lists models; the readiness probe names them all.
    readiness = server.readiness()
    known = readiness["models"]
    rows = list(describe(server, names or sorted(known), known))
    if as_json:
        click.echo(json.dumps([dict(zip(map(str.lower, HEAD), row, strict=True)) for row in rows], indent=2))
    elif rows:
        print_rows([HEAD, *rows])
    else:
        click.echo("no models")
    if not readiness["ready"]:
        click.echo(f"the server is not ready: {readiness['reason']}", err=True)


BODY_KEYS = {"predict": ("instances", "inputs"), "classify": ("examples",), "regress": ("examples",)}


def read_input(text: str) -> Any:
    """Return the JSON of an argument: itself, `@FILE`, or `-` for standard input."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except OSError as fault:
            raise click.BadParameter(f"cannot read {text[1:]}: {fault.strerror}") from None
    try:
        return json.loads(text)
    except ValueError as fault:
        raise click.BadParameter(f"not JSON: {fault}") from None


def request_body(given: Any, method: str, signature: str | None) -> dict[str, Any]:
    """Return a request body: a whole request as it is, a list as rows, anything else as the only row."""
    keys = BODY_KEYS[method]
    if isinstance(given, dict) and any(key in given for key in keys):
        body = dict(given)
    else:
        body = {keys[0]: given if isinstance(given, list) else [given]}
    if signature is not None:
        body["signature_name"] = signature
    return body


def print_answer(answer: Any) -> None:
    """Print rows one a line, named outputs and other replies as indented JSON."""
    rows = answer.get("predictions") or answer.get("results") if isinstance(answer, dict) else None
    if isinstance(rows, list):
        for row in rows:
            click.echo(json.dumps(row))
    else:
        click.echo(json.dumps(answer, indent=2))


@click.command(short_help="Send one request to a running server.")
@click.argument("model")
@click.argument("input", default="-", metavar="[JSON|@FILE|-]")
@click.option("--version", type=int, help="Ask this version instead of the newest.")
@click.option("--label", help="Ask the version this label points at.")
@click.option("--signature", help="Ask this signature instead of serving_default.")
@click.option(
    "--method",
    type=click.Choice(list(BODY_KEYS)),
    default="predict",
    show_default=True,
    help="What to ask for.",
)
@click.option("--raw", is_flag=True, help="Print the reply's body as it came.")
@url_option
@with_trust
def infer(
    model: str,
    input: str,
    version: int | None,
    label: str | None,
    signature: str | None,
    method: str,
    raw: bool,
    url: str,
    trust: Trust,
) -> None:
    """Ask MODEL of a running server and print one line per row of its answer.

    The input is a list of rows, or a whole TF Serving request with `instances`, `inputs` or `examples`.

    \b
    fastserve infer half_plus_two "[1.0, 2.0, 5.0]"
    fastserve infer digits @image.json
    fastserve infer digits --method classify '[{"image": [0, 0, ...]}]'
    jq .rows data.json | fastserve infer digits -
    fastserve infer digits @image.json --url https://models.example:8443 --cacert ca.pem
    """
    if version is not None and label:
        raise click.UsageError("--version and --label exclude each other")
    body = request_body(read_input(input), method, signature)
    path = f"{model_path(model, version, label)}:{method}"
    answer = ServerClient(url, trust).ask(path, json.dumps(body).encode())
    if raw:
        sys.stdout.buffer.write(answer)
    else:
        print_answer(json.loads(answer))
