"""`fastserve infer`: one request from the command line, its answer on the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from fastserve.cli.client import ServerClient, Trust, model_path, url_option, with_trust

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
