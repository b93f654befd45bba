"""`fastserve worker`: run batches of a server on another machine, or on this one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastserve.errors import ConfigError

if TYPE_CHECKING:
    from fastserve.workers.remote.main import WorkerOrder


@click.command(short_help="Run batches of a server on another machine.")
@click.option(
    "--connect",
    "addresses",
    multiple=True,
    metavar="HOST:PORT[-PORT]",
    help="Where a model's server listens.",
)
@click.option("--key", type=click.Path(dir_okay=False, path_type=Path), help="worker.key of --make-keys.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Workers for each model."
)
@click.option(
    "--cache", type=click.Path(file_okay=False, path_type=Path), help="Folder of models that were sent."
)
@click.option("--device", default="", help="Where models compute: cpu, cuda:0, ...; default: the CPU.")
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"])
)
@click.option(
    "--make-keys",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write server.key and worker.key there.",
)
def worker(
    addresses: tuple[str, ...],
    key: Path | None,
    workers: int,
    cache: Path | None,
    device: str,
    log_level: str,
    make_keys: Path | None,
) -> None:
    """Run batches of the models whose model.yaml has a `placement`, wherever their server is.

    The worker loads what the server tells it to, and takes batches from the server's one queue whenever it
    has nothing to do. Every port of --connect has workers of its own: a version that is loaded while another
    serves listens on the next port. It ends at SIGTERM, after its batch.

    \b
    fastserve worker --make-keys keys/                                    server.key, worker.key
    fastserve worker --connect 10.0.0.5:7300-7301 --key keys/worker.key
    fastserve worker --connect 127.0.0.1:7300 --workers 4                 on the server's machine
    """
    from fastserve.util.logs import setup_logs
    from fastserve.workers.remote.keys import import_zmq, write_keys
    from fastserve.workers.remote.supervisor import Supervisor, default_cache

    try:
        import_zmq()
        if make_keys is not None:
            for path in write_keys(make_keys):
                click.echo(path)
            return
        orders = _read_orders(addresses, key, workers, cache or default_cache(), device, log_level)
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from None

    setup_logs(log_level)
    Supervisor(orders).run()


def _read_orders(
    addresses: tuple[str, ...], key: Path | None, workers: int, cache: Path, device: str, log_level: str
) -> list[WorkerOrder]:
    from fastserve.settings.model_options import is_loopback, read_address
    from fastserve.workers.remote.keys import read_key
    from fastserve.workers.remote.main import WorkerOrder

    if not addresses:
        raise click.UsageError("Missing option '--connect'.")
    if key is not None:
        read_key(key, "worker")
    orders = []
    for address in addresses:
        host, ports = read_address(address)
        if key is None and not is_loopback(host):
            raise ConfigError(f"--connect {address}: without --key only a loopback address is allowed")
        for port in ports:
            order = WorkerOrder(f"{host}:{port}", str(key or ""), str(cache), device, log_level)
            orders += [order] * workers
    return orders
