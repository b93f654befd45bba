"""CURVE keys of remote runners and their workers: made, kept in files, and asked for at a connection.

    fastserve worker --make-keys FOLDER      server.key for the server, worker.key for every remote worker

The two sides know each other: a worker lets in one server, by its public key, and the server one public key
of workers, by ZeroMQ's authentication protocol (ZAP, RFC 27). Files are JSON, readable by their owner alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fastserve.errors import ConfigError, install_text

MISSING_ZMQ = f"remote workers need pyzmq: {install_text('pyzmq', 'remote')}"
Z85 = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
_ZAP = "inproc://zeromq.zap.01"
_MOST_REFUSALS = 64


class SideKey(msgspec.Struct, frozen=True):
    """One side's key pair, and the public key of the other side."""

    role: str
    public: Z85
    secret: Z85
    other: Z85


def import_zmq() -> Any:
    """Return pyzmq. Raises ConfigError where it is missing, or has no CURVE."""
    try:
        import zmq
    except ImportError:
        raise ConfigError(MISSING_ZMQ) from None
    return zmq


def make_keys() -> tuple[SideKey, SideKey]:
    """Make a key for the server and one for its workers."""
    zmq = import_zmq()
    if not zmq.has("curve"):
        raise ConfigError("this pyzmq was built without CURVE: install a wheel of it")
    pairs = [tuple(part.decode() for part in zmq.curve_keypair()) for _ in range(2)]
    (server_public, server_secret), (worker_public, worker_secret) = pairs
    return (
        SideKey("server", server_public, server_secret, worker_public),
        SideKey("worker", worker_public, worker_secret, server_public),
    )


def write_keys(folder: Path) -> tuple[Path, Path]:
    """Write server.key and worker.key into a folder. Raises ConfigError where they are there already,
    OSError."""
    paths = folder / "server.key", folder / "worker.key"
    folder.mkdir(parents=True, exist_ok=True)
    for path, key in zip(paths, make_keys(), strict=True):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} is there already: keys are not overwritten") from None
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(key) + b"\n")
    return paths


def read_key(path: Path, role: str) -> SideKey:
    """Read the key of one side. Raises ConfigError."""
    try:
        key = msgspec.json.decode(path.read_bytes(), type=SideKey)
    except OSError as error:
        raise ConfigError(f"key {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError):
        raise ConfigError(f"key {path} is none of `fastserve worker --make-keys`") from None
    if key.role != role:
        raise ConfigError(f"key {path} is the {key.role}'s, allowed: {role}.key of the same keys")
    return key


class KeyGate:
    """The server's end of ZAP: lets in the workers whose public key is `allowed`. Owns its socket."""

    def __init__(self, context: Any, allowed: str) -> None:
        from zmq.utils import z85

        zmq = import_zmq()
        self._nothing = zmq.Again
        self._allowed = z85.decode(allowed.encode())
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def turn(self) -> list[str]:
        """Answer every question that waits; returns the addresses that were turned away."""
        refused: list[str] = []
        while True:
            try:
                asked = self.socket.recv_multipart(1)  # NOBLOCK
            except self._nothing:
                return refused
            # version, request id, domain, address, identity, mechanism, the client's public key
            known = len(asked) == 7 and asked[5] == b"CURVE" and asked[6] == self._allowed
            if not known and len(refused) < _MOST_REFUSALS:
                refused.append(asked[3].decode("ascii", "replace") if len(asked) > 3 else "?")
            status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
            number = asked[1] if len(asked) > 1 else b""
            self.socket.send_multipart([b"1.0", number, status, text, b"", b""])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(0)


def secure_server(socket: Any, key: SideKey) -> None:
    """Make a socket the server of CURVE."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = key.public.encode(), key.secret.encode()


def secure_worker(socket: Any, key: SideKey) -> None:
    """Make a socket the client of CURVE."""
    socket.curve_serverkey = key.other.encode()
    socket.curve_publickey, socket.curve_secretkey = key.public.encode(), key.secret.encode()
