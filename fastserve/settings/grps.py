"""Options of the grps dialect, and a deployment's `server.yml` as settings of this server.

    grps_overrides({"interface": {"framework": "http+grpc", "host": "0.0.0.0", "port": "7080,7081"}})

Fields are read as the original reads them. One that cannot be kept here is refused by its name, and one
without effect here (logs, GPU memory) is reported as ignored.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fastserve.errors import ConfigError
from fastserve.settings.fields import convert

FILE = "server.yml"
HTTP_PORT, RPC_PORT = 7080, 7081
Path = Annotated[str, Meta(pattern=r"^(?:/[a-zA-Z0-9_\-/]+)?$")]
CtrlMode = Literal["query_param", "header_param", "body_param"]


class GrpsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The grps dialect. Where its two original servers differ, each may be had."""

    default_model: str = ""
    """Model of calls that name none; empty: the deployment's dag, or the only model."""
    timeout_ms: Annotated[int, Meta(ge=0)] = 0
    """Milliseconds a predict may take; 0 for no limit, as in the original."""
    start_online: bool = False
    """Ready from the start, not only once somebody has called online."""
    shared_ready: bool = True
    """One ready flag for HTTP and gRPC (C++ server); false: one each (Python server)."""
    http_status: Literal["real", "always_200"] = "real"
    """Status of HTTP errors: the code in the body (Python server), or 200 (C++ server)."""
    unknown_model_code: Literal[500, 404] = 500
    """Code of a model that is not there; 500 in both original servers."""
    grpc_not_ready_code: Literal[503, 403] = 503
    """Code of CheckReadiness while not ready: C++ server, Python server."""
    int64: Literal["string", "number"] = "string"
    """64-bit integers in JSON replies: text (Python server) or numbers (C++ server)."""
    json_charset: bool = True
    """Content-Type of JSON replies ends with ;charset=utf-8 (Python server)."""
    ndarray_of_several: Literal["error", "first"] = "error"
    """return-ndarray with several output tensors: C++ server, Python server."""
    server_metadata_first: Literal["inference", "server"] = "inference"
    """First file of the server's metadata: Python server, C++ server."""
    empty_str_data: Literal["accept", "reject"] = "accept"
    """A request of "str_data": "": C++ server, Python server."""
    strict_content_type: bool = False
    """Take a Content-Type only to the letter, without parameters (Python server)."""
    flat_double: bool = True
    """Read flat_double, as the documentation has it, as flat_float64."""
    bare_names: bool = False
    """A model's name without its version means the latest; the originals know none."""
    streaming_ctrl_mode: CtrlMode = "query_param"
    """Where an HTTP call says that it wants a stream."""
    streaming_ctrl_key: Annotated[str, Meta(min_length=1)] = "streaming"
    """And under which name."""
    streaming_content_type: Annotated[str, Meta(pattern="^[!-~ ]+$")] = "application/octet-stream"
    """Content-Type of HTTP streams."""
    customized_path: Path = ""
    """A path beside the built-in one on which models are run; empty for none."""
    customized_body: bool = False
    """On that path the model reads the HTTP request and writes the reply itself."""

    def __post_init__(self) -> None:
        if self.customized_path.startswith("/grps/v1/"):
            raise ValueError(
                f"customized_path: given {self.customized_path!r}, allowed: none below /grps/v1/"
            )


class StreamingCtrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of requests for streams."""

    ctrl_mode: CtrlMode = "query_param"
    ctrl_key: str = "streaming"
    res_content_type: str = "application/octet-stream"


class CustomizedHttp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A predict path of the deployment's own."""

    path: Path = ""
    customized_body: bool = False
    streaming_ctrl: StreamingCtrl = StreamingCtrl()


class Interface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses and protocols of a deployment."""

    framework: Literal["http", "http+grpc", "http+brpc"] = "http+grpc"
    host: str = "0.0.0.0"
    port: str | int = f"{HTTP_PORT},{RPC_PORT}"
    customized_predict_http: CustomizedHttp | None = None


class ServerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of server.yml."""

    interface: Interface = Interface()
    max_connections: Annotated[int, Meta(ge=1)] = 1000
    max_concurrency: Annotated[int, Meta(ge=1)] = 32
    gpu: dict[str, Any] | None = None
    log: dict[str, Any] | None = None


def read_server_file(raw: Mapping[str, Any]) -> ServerFile:
    """Return the checked fields of a server.yml. Raises ConfigError naming field and allowed values."""
    found = convert(raw, ServerFile, FILE)
    if found.interface.framework == "http+brpc":
        raise ConfigError(f"{FILE}: interface.framework: given http+brpc, allowed: http or http+grpc")
    try:
        ipaddress.IPv4Address(found.interface.host)
    except ValueError:
        raise ConfigError(
            f"{FILE}: interface.host: given {found.interface.host!r}, allowed: an IPv4 address"
        ) from None
    return found


def grps_overrides(found: ServerFile) -> tuple[dict[str, Any], list[str]]:
    """Return settings by their dotted paths, and the ignored fields. Raises ConfigError."""
    face = found.interface
    http, rpc = _ports(face)
    listener = {"dialects": ["grps"]}
    said: dict[str, Any] = {
        "http": [{"address": f"{face.host}:{http}", **listener}],
        "grpc": [{"address": f"{face.host}:{rpc}", **listener}] if rpc else [],
        "limits.connections": found.max_connections,
        "grpc_options.connections": found.max_connections,
    }
    custom = face.customized_predict_http
    if custom is not None:
        said |= {
            "grps.customized_path": custom.path,
            "grps.customized_body": custom.customized_body,
            "grps.streaming_ctrl_mode": custom.streaming_ctrl.ctrl_mode,
            "grps.streaming_ctrl_key": custom.streaming_ctrl.ctrl_key,
            "grps.streaming_content_type": custom.streaming_ctrl.res_content_type,
        }
    return said, [name for name in ("gpu", "log") if getattr(found, name) is not None]


def _ports(face: Interface) -> tuple[int, int]:
    """Return the ports for HTTP and gRPC, 0 for none."""
    text = str(face.port).replace(" ", "")
    wanted = r"\d{1,5}" if face.framework == "http" else r"\d{1,5},\d{1,5}"
    if not re.fullmatch(wanted, text) and not (
        face.framework == "http" and re.fullmatch(r"\d{1,5},\d{1,5}", text)
    ):
        allowed = "HTTP_PORT" if face.framework == "http" else "HTTP_PORT,RPC_PORT"
        raise ConfigError(f"{FILE}: interface.port: given {face.port!r}, allowed: {allowed}")
    http, _, rpc = text.partition(",")
    if int(http) > 65535 or int(rpc or 0) > 65535:
        raise ConfigError(f"{FILE}: interface.port: given {face.port!r}, allowed: up to 65535")
    return int(http), int(rpc) if face.framework != "http" else 0
