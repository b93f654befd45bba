"""Whom the commands that ask a server trust, over https:// and gRPC with TLS, and who they say they are."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

if TYPE_CHECKING:
    import grpc

Command = TypeVar("Command", bound=Callable[..., Any])
READABLE = click.Path(exists=True, dir_okay=False)


class Trust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files, "" for none; without `cacert` the machine's own authorities."""

    cacert: str = ""
    insecure: bool = False
    cert: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """For HTTP. Raises ClickException for files that are none."""
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
        """For gRPC, whose library takes nobody on faith. Raises ClickException."""
        import grpc

        if self.insecure:
            raise click.ClickException("--insecure: not over gRPC, whose library always looks; use --cacert")
        read = [Path(path).read_bytes() if path else None for path in (self.cacert, self.key, self.cert)]
        if self.cert and not self.key:
            read[1] = read[2]
        return grpc.ssl_channel_credentials(*read)


def with_trust(command: Command) -> Command:
    """The options a command has for it; it is called with `trust`."""

    @functools.wraps(command)
    def called(
        *args: Any, cacert: str | None, insecure: bool, cert: str | None, key: str | None, **options: Any
    ) -> Any:
        trust = Trust(cacert or "", insecure, cert or "", key or "")
        return command(*args, trust=trust, **options)

    options = (
        click.option("--cacert", type=READABLE, envvar="FASTSERVE_CACERT", help="Trust these, in PEM."),
        click.option("--insecure", is_flag=True, help="Trust any server (HTTP only)."),
        click.option("--cert", type=READABLE, help="A certificate of this client, in PEM."),
        click.option("--key", type=READABLE, help="Its key, where it is in another file."),
    )
    decorated: Any = called
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]
