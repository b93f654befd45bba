"""Requests that any client may send to a route: bodies of any size, made from the server's own tables.

    for name, target, body, headers in http_requests(1 << 20): ...      each route and verb of every dialect
    for name, path, data in rpc_requests(1 << 20): ...                   each RPC, by its message's descriptor

JSON: `FILLINGS` are large values, `PLACES` are their positions in a document of each API. Protobuf: the
descriptor gives the fields and which of them can be large. Streams are many messages.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fastserve.app.json_api import SPEC as APP
from fastserve.dialects import SPECS as DIALECTS
from fastserve.protos import load

SPECS = (APP, *DIALECTS)
SAID = {
    "/...": "/unregisterall", "live|ready": "ready", "load|unload": "load", "[/metadata]": "/metadata",
    "tfserving.monitoring_path": "/monitoring/prometheus/metrics", "/v1/unregisterall": "/v1/anything",
    "/CUSTOMIZED-PATH": "/customized", "[/versions/N or /labels/L]": "",
    "VERSION": "1", "REPOSITORY": "r", "REGION": "x", "timed-N": "timed-1", "ROLE": "prefill",
}  # fmt: skip
"""A word of a route's path -> what a client writes for it."""
MODELS = {
    "app": ("greet", "know", "rows", "mix", "count", "lengths"),  # of app_models.py
    "textgen": ("tokens",),
    "tfserving": ("free", "classes"),
    "kserve_v2": ("free", "texts", "chat"),
}
ENDS_THE_SERVER = {"/stopService"}  # refused by default: the server asks for `textgen.stop_service`
V1_HEADER = 'batch_size: 1 input { name: "x" dims: 4 } output { name: "y" }'


class Http(NamedTuple):
    """A request. `name`: the shape's, and where it stands."""

    name: str
    verb: str
    target: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Rpc(NamedTuple):
    """A call: `data` is the whole of what the stream carries, prefixes included."""

    name: str
    path: str
    data: bytes


# --- JSON -------------------------------------------------------------------------------------------


def repeat(piece: bytes, size: int, last: bytes = b"") -> bytes:
    return piece * ((size - len(last)) // len(piece)) + last


def keys(size: int) -> bytes:
    made = b",".join(b'"%x":1' % number for number in range(size // 9))
    return b"{%b}" % made[: made.rfind(b',"', 0, size) if len(made) > size else None]


FILLINGS: dict[str, Callable[[int], bytes]] = {
    "numbers": lambda n: b"[%b]" % repeat(b"1,", n, b"1"),
    "fractions": lambda n: b"[%b]" % repeat(b"0.1234567,", n, b"1"),
    "nulls": lambda n: b"[%b]" % repeat(b"null,", n, b"1"),
    "strings": lambda n: b"[%b]" % repeat(b'"",', n, b'""'),
    "wide lists": lambda n: b"[%b]" % repeat(b"[1],", n, b"[1]"),
    "deep lists": lambda n: b"[" * (n // 2) + b"]" * (n // 2),
    "lists of lists": lambda n: b"[%b]" % repeat(b"[[[[1]]]],", n, b"[[[[1]]]]"),
    "empty lists": lambda n: b"[%b]" % repeat(b"[],", n, b"[]"),
    "nested empty lists": lambda n: b"[%b]" % repeat(b"[[],[]],", n, b"[]"),
    "empty objects": lambda n: b"[%b]" % repeat(b"{},", n, b"{}"),
    "objects": lambda n: b"[%b]" % repeat(b'{"role":"user","content":"a"},', n, b"{}"),
    "parts": lambda n: b"[%b]" % repeat(b'{"type":"text","text":"a"},', n, b'{"type":"text","text":"a"}'),
    "tools": lambda n: (
        b"[%b]" % b",".join(b'{"type":"function","function":{"name":"f%x"}}' % i for i in range(n // 48))
    ),
    "keys": keys,
    "one key again": lambda n: b"{%b}" % repeat(b'"x":1,', n, b'"x":1'),
    "a long key": lambda n: b'{"%b":1}' % (b"k" * n),
    "a long string": lambda n: b'"%b"' % repeat(b"word ", n),
    "escapes": lambda n: b'"%b"' % repeat(b"\\u00e9", n),
    "base64": lambda n: b'{"b64":"%b"}' % repeat(b"QUJD", n),
    "base64 of nothing": lambda n: b"[%b]" % repeat(b'{"b64":""},', n, b'{"b64":""}'),
    "base64 of rows": lambda n: b"[%b]" % repeat(b'{"b64":"QUJDRA=="},', n, b'{"b64":"QQ=="}'),
    "base64 that ends wrong": lambda n: b'{"b64":"%b"}' % repeat(b"QUJD", n, b"Q"),
    "base64 texts": lambda n: b"[%b]" % repeat(b'"QUJDRA==",', n, b'"QQ=="'),
    "an image": lambda n: (
        b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]}]'
        % repeat(b"QUJD", n)
    ),
    "a long number": lambda n: b"1" * n,
}
PLACES: dict[str, tuple[bytes, ...]] = {
    "textgen": (
        b'{"prompt":%b,"model":"tokens","max_tokens":2}',
        b'{"inputs":%b,"parameters":{"max_new_tokens":2}}',
        b'{"messages":%b,"model":"tokens","max_tokens":2}',
        b'{"messages":[{"role":"user","content":%b}],"model":"tokens","max_tokens":2}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","stop":%b}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","logit_bias":%b}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","chat_template_kwargs":%b}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","tools":%b}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","x":%b}',
        b'{"messages":[{"role":"user","content":"a"}],"model":"tokens","tools":[{"type":"function","function":{"name":"f","parameters":%b}}]}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","functions":%b}',
        b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"a","tool_calls":%b}],"model":"tokens"}',
        b'{"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":%b}]}],"model":"tokens","max_tokens":2}',
        b'{"messages":[{"role":"user","content":"a"}],"model":"tokens","max_tokens":2,"tools":[{"name":"f","input_schema":%b}]}',
        b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":%b}]},{"role":"user","content":"a"}],"model":"tokens","max_tokens":2}',
        b'{"inputs":"a","parameters":{"max_new_tokens":2,"stop":%b}}',
        b'{"inputs":"a","parameters":%b}',
        b'{"inputs":"a","parameters":{"max_new_tokens":2,"grammar":{"type":"json","value":%b}}}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"max_tokens":2,"model":"tokens","guided_json":%b}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"model":"tokens","guided_choice":%b}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"model":"tokens","guided_regex":%b}',
        b'{"prompt":"a","messages":[{"role":"user","content":"a"}],"model":"tokens","response_format":{"type":"json_schema","json_schema":{"schema":{"enum":%b}}}}',
        b'{"text_input":%b,"parameters":{"max_new_tokens":2}}',
        b'{"input":%b,"model":"tokens"}',
        b'{"input":"a","instructions":%b,"model":"tokens","max_output_tokens":2}',
        b'{"input":[{"role":"user","content":%b}],"model":"tokens","max_output_tokens":2}',
        b'{"input":"a","model":"tokens","tools":%b}',
        b'{"input":"a","model":"tokens","tools":[{"type":"function","name":"f","parameters":%b}]}',
        b'{"input":"a","model":"tokens","text":{"format":{"type":"json_schema","schema":%b}}}',
        b'{"input":[{"type":"function_call","call_id":"a","name":"f","arguments":%b}],"model":"tokens"}',
        b'{"input":[{"type":"function_call_output","call_id":"a","output":%b}],"model":"tokens"}',
        b'{"messages":[{"role":"user","content":"a"}],"system":%b,"model":"tokens","max_tokens":2}',
        b'{"tokens":%b,"model":"tokens"}',
        b'{"query":"a","documents":%b,"model":"pairs"}',
        b'{"query":%b,"documents":["a","b"],"model":"pairs"}',
        b'{"text_1":"a","text_2":%b,"model":"pairs"}',
        b'{"inputs":[{"name":"input0","shape":[1,1],"datatype":"UINT32","data":%b}],"outputs":[{"name":"output0"}]}',
    ),
    "tfserving": (
        b'{"instances":%b}',
        b'{"inputs":%b}',
        b'{"inputs":{"x":%b}}',
        b'{"instances":[{"x":%b}]}',
        b'{"examples":%b}',
        b'{"examples":[{"x":%b}]}',
        b'{"context":%b,"examples":[{"x":1}]}',
        b'{"signature_name":%b,"instances":[[1,2,3,4]]}',
    ),
    "mlflow": (
        b'{"dataframe_split":{"columns":["x"],"data":%b}}',
        b'{"dataframe_split":{"columns":%b,"data":[[1]]}}',
        b'{"dataframe_records":%b}',
        b'{"dataframe_records":[{"x":%b}]}',
        b'{"instances":%b}',
        b'{"instances":[{"x":%b}]}',
        b'{"inputs":%b}',
        b'{"inputs":{"x":%b}}',
        b'{"inputs":[[1]],"params":%b}',
    ),
    "app": (
        b"%b",
        b'{"x":%b}',
        b'{"x":[[1],%b]}',
        b'{"a":[1],"b":%b}',
        b'{"name":%b}',
        b'{"name":"a","times":%b}',
        b'{"words":%b}',
        b'{"to":%b}',
    ),
    "kserve_v2": (
        b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":%b}]}',
        b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"BYTES","data":%b}]}',
        b'{"inputs":[{"name":"x","shape":%b,"datatype":"FP32","data":[1]}]}',
        b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4],"parameters":%b}]}',
        b'{"inputs":%b}',
        b'{"outputs":%b,"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
        b'{"parameters":%b,"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
        b'{"id":%b,"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
        b'{"text_input":%b}',
        b'{"x":%b}',
    ),
    "grps": (
        b'{"ndarray":%b}',
        b'{"str_data":%b}',
        b'{"gtensors":{"tensors":[{"name":"x","dtype":"DT_FLOAT32","shape":[1,4],"flat_float32":%b}]}}',
        b'{"gtensors":{"tensors":%b}}',
        b'{"gmap":{"s_i32":%b}}',
        b'{"model":%b,"ndarray":[[1]]}',
    ),
}
ROWS: dict[str, tuple[str, bytes]] = {
    "tfserving": ("/v1/models/free:predict", b'{"instances":[%(wide)b]}'),
    "kserve_v2": (
        "/v2/models/free/infer",
        b'{"inputs":[{"name":"x","shape":[%(rows)d,1],"datatype":"FP32","data":[%(flat)b]}]}',
    ),
    "app": ("/rows", b'{"x":[%(wide)b]}'),
    "grps": (
        "/grps/v1/infer/predict?model=free-1",
        b'{"gtensors":{"tensors":[{"dtype":"DT_FLOAT32","shape":[%(rows)d,1],"flat_float32":[%(flat)b]}]}}',
    ),
}
"""Where requests for rows of one number go, and what they are."""
ADMIN_PLACES = (
    b'{"parameters":%b}', b'{"trace_level":%b}', b'{"key":%b,"byte_size":8}', b'{"x":%b}',
    b'{"traffic":%b}', b'{"sticky":%b}', b'{"shadow":%b}',
)  # fmt: skip
BODIES: dict[str, Callable[[int], tuple[bytes, tuple[tuple[str, str], ...]]]] = {
    "whitespace": lambda n: (b" " * n, ()),
    "garbage": lambda n: (random.Random(1).randbytes(n), ()),
    "zeros": lambda n: (bytes(n), ()),
    "gzip of zeros": lambda n: (gzip.compress(bytes(n), 9), (("Content-Encoding", "gzip"),)),
    "gzip of numbers": lambda n: (
        gzip.compress(b'{"instances":%b}' % FILLINGS["fractions"](n), 1), (("Content-Encoding", "gzip"),)
    ),
    "a mixed body": lambda n: (b'{"inputs":[]}' + bytes(n), (("Inference-Header-Content-Length", "13"),)),
}  # fmt: skip


@cache
def fill(name: str, size: int) -> bytes:
    return FILLINGS[name](size)


def targets(dialect: str, path: str) -> list[str]:
    """Targets that clients write for a path of the tables, for each model of the dialect."""
    for word, said in SAID.items():
        path = path.replace(word, said)
    whole = [re.sub(r"\[([^]]*)\]", "", path)]
    if ":predict|classify|regress" in path:
        whole = [whole[0].replace(":predict|classify|regress", verb) for verb in (":predict", ":classify")]
    if re.search("MODEL|NAME", path):
        models = MODELS.get(dialect, ("free",))
        whole = [re.sub("MODEL|NAME", model, one) for one in whole for model in models]
    return whole


def of_rows(dialect: str, rows: int) -> tuple[str, bytes]:
    """The target and the body of a request of so many rows for the model `free`."""
    target, body = ROWS[dialect]
    ones = {b"rows": rows, b"flat": b",".join([b"1"] * rows), b"wide": b",".join([b"[1]"] * rows)}
    return target, body % ones


def of_integers(dialect: str, rows: int, row_items: int) -> tuple[str, bytes]:
    """The RPC and a serialized request of int32 rows, a byte each, for the model `integers`."""
    messages, values = load(dialect), [1] * (rows * row_items)
    if dialect == "tfserving":
        made = messages.PredictRequest(model_spec={"name": "integers"})
        made.inputs["x"].dtype = messages.DataType.Value("DT_INT32")
        for size in (rows, row_items):
            made.inputs["x"].tensor_shape.dim.add(size=size)
        made.inputs["x"].int_val.extend(values)
        return "/tensorflow.serving.PredictionService/Predict", made.SerializeToString()
    if dialect == "grps":
        made = messages.GrpsMessage(model="integers-1")
        made.gtensors.tensors.add(dtype="DT_INT32", shape=[rows, row_items], flat_int32=values)
        return "/grps.protos.v1.GrpsService/Predict", made.SerializeToString()
    made = messages.ModelInferRequest(model_name="integers")
    given = made.inputs.add(name="x", datatype="INT32", shape=[rows, row_items])
    given.contents.int_contents.extend(values)
    return "/inference.GRPCInferenceService/ModelInfer", made.SerializeToString()


class Route(NamedTuple):
    """A route of the tables as clients write it."""

    dialect: str
    verb: str
    target: str
    infers: bool


def routes() -> list[Route]:
    """Each route and verb of every dialect."""
    found = [
        Route(spec.name, verb, target, scope.value == "infer")
        for spec in SPECS
        for row in spec.routes
        for verb, scope in row.scopes.items()
        for target in targets(spec.name, row.path)
        if target not in ENDS_THE_SERVER
    ]
    return list(dict.fromkeys(found))


def http_requests(route: Route, size: int, some: int = 0) -> Iterator[Http]:
    """Every shape in every place; with `some` every so many-th of them, another beginning for each route."""
    places = PLACES.get(route.dialect, ()) if route.infers else ()
    shapes = [
        (f"{filling} in {place.decode()}", partial_body(place, filling, size))
        for place in places or ADMIN_PLACES
        for filling in FILLINGS
    ]
    shapes += [(name, partial(make, size)) for name, make in BODIES.items()]
    for name, make in picked(shapes, some, f"{route.verb} {route.target}"):
        body, headers = make()
        kind = "application/json"
        if route.dialect == "triton_v1":
            kind, headers = "application/octet-stream", (*headers, ("NV-InferRequest", V1_HEADER))
        yield Http(name, route.verb, route.target, body, (("Content-Type", kind), *headers))


KEPT_MODELS = ("logged", "logged_texts", "cached", "cached_texts")
"""Models whose requests or answers the server keeps: the request log, the response cache."""


def kept_requests(size: int) -> Iterator[Http]:
    """Requests for models with loose inputs, and for those whose requests or answers are kept."""
    for model in KEPT_MODELS:
        datatype = "BYTES" if model.endswith("texts") else "FP32"
        for name in ("numbers", "fractions", "strings", "a long string", "escapes"):
            if (datatype == "BYTES") == (name not in ("numbers", "fractions")):
                filled = fill(name, size)
                data = filled if filled.startswith(b"[") else b"[%b]" % filled
                count = data.count(b",") + 1 if filled is data else 1
                yield _of_tensors(f"{name} to {model}", model, [("x", [1, count], datatype, data)])
        tensor = ("x", [1, 1], datatype, b'["a"]' if datatype == "BYTES" else b"[1]")
        yield _of_tensors(f"a long id to {model}", model, [tensor], id=fill("a long string", size))
    half = b"[%b]" % repeat(b"1,", size // 2, b"1")
    rows = half.count(b",") + 1
    table = b'{"content_type":"pd"}'
    for datatype in ("UINT8", "FP64"):
        columns = [(name, [rows], datatype, half) for name in "ab"]
        yield _of_tensors(f"columns of {datatype}", "loose", columns, parameters=table)
    many = [(f"c{number}", [1], "INT8", b"[1]") for number in range(size // 60)]
    yield _of_tensors("many columns", "loose", many, parameters=table)
    nulls = b"[%b]" % repeat(b"null,", size, b"1")
    yield _of_tensors("nulls", "loose", [("a", [(nulls.count(b",") + 1) // 2, 2], "FP64", nulls)])
    for datatype, item in (("UINT8", 1), ("BOOL", 1), ("INT64", 8), ("FP32", 4)):
        rows = size // item // 2
        yield _of_bytes(f"a matrix of {datatype}", [("a", [rows, 2], datatype, bytes(2 * rows * item))])
        columns = [(name, [rows], datatype, bytes(rows * item)) for name in "ab"]
        yield _of_bytes(f"bytes in columns of {datatype}", columns)


V2Tensor = tuple[str, list[int], str, bytes]
"""Name, shape, datatype, and the values as JSON or as bytes."""


def _of_tensors(name: str, model: str, tensors: list[V2Tensor], **members: bytes) -> Http:
    inputs = b",".join(
        b'{"name":"%b","shape":%b,"datatype":"%b","data":%b}'
        % (who.encode(), str(shape).encode(), datatype.encode(), data)
        for who, shape, datatype, data in tensors
    )
    more = b"".join(b'"%b":%b,' % (key.encode(), value) for key, value in members.items())
    body = b'{%b"inputs":[%b]}' % (more, inputs)
    return Http(name, "POST", f"/v2/models/{model}/infer", body, (("Content-Type", "application/json"),))


def _of_bytes(name: str, tensors: list[V2Tensor]) -> Http:
    """A request for the model `loose`, whose tensors follow its JSON."""
    inputs = [
        {"name": who, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
        for who, shape, datatype, data in tensors
    ]
    head = json.dumps({"parameters": {"content_type": "pd"}, "inputs": inputs}).encode()
    body = head + b"".join(data for _, _, _, data in tensors)
    headers = (("Inference-Header-Content-Length", str(len(head))),)
    return Http(name, "POST", "/v2/models/loose/infer", body, headers)


def partial_body(
    place: bytes, filling: str, size: int
) -> Callable[[], tuple[bytes, tuple[tuple[str, str], ...]]]:
    return lambda: (place % fill(filling, size), ())


def picked(shapes: list[Any], some: int, seed: str) -> list[Any]:
    """`some` of them, the same ones each time."""
    return random.Random(seed).sample(shapes, min(some, len(shapes))) if some else shapes


# --- protobuf -----------------------------------------------------------------------------------------

LEN, VARINT = 2, 0
DEPTH = 4  # of messages in messages
NAMES = {"model_name": b"free", "model": b"free", "name": b"free"}


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def put(number: int, data: bytes) -> bytes:
    return tag(number, LEN) + varint(len(data)) + data


def prefix(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def leaves(
    message: Descriptor, depth: int = DEPTH, seen: tuple[str, ...] = ()
) -> Iterator[tuple[list[int], FieldDescriptor]]:
    """Every field of it and of the messages in it, with the numbers of the messages around it."""
    for field in message.fields:
        yield [], field
        inner = field.message_type
        if inner is not None and depth > 1 and inner.full_name not in seen:
            for path, leaf in leaves(inner, depth - 1, (*seen, inner.full_name)):
                yield [field.number, *path], leaf


def contents(field: FieldDescriptor, size: int) -> Iterator[tuple[str, bytes]]:
    """Contents of a field that can be large."""
    number = field.number
    if field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        empty = tag(number, LEN) + b"\0"
        yield "empty ones", repeat(empty, size)
        if field.message_type is None:
            yield "a long one", put(number, b"a" * size)
    elif field.is_repeated:
        yield "packed ones", put(number, b"\1" * size)
        yield "ones", repeat(tag(number, VARINT) + b"\1", size)
    else:
        yield "again and again", repeat(tag(number, VARINT) + b"\1", size)


def beginning(message: Descriptor) -> bytes:
    """The model's name, where the message has it."""
    made = b""
    for field in message.fields:
        if field.name in NAMES and field.type == field.TYPE_STRING:
            made += put(field.number, NAMES[field.name])
        elif field.name == "model_spec":
            made += put(field.number, put(1, b"free"))
    return made


def message_shapes(message: Descriptor, size: int) -> Iterator[tuple[str, bytes]]:
    begun = beginning(message)
    for path, field in leaves(message):
        for name, data in contents(field, size):
            for number in reversed(path):
                data = put(number, data)
            yield f"{field.full_name}: {name}", begun + data
    yield "unknown fields", begun + repeat(tag(500, VARINT) + b"\1", size)
    yield "unknown messages", begun + repeat(tag(501, LEN) + b"\0", size)
    yield "groups", begun + repeat(tag(502, 3) + tag(502, 4), size)
    yield "deep groups", begun + repeat(tag(502, 3), size)
    yield "garbage", random.Random(2).randbytes(size)
    yield "zeros", bytes(size)


HEALTH, REFLECTION = health_pb2.HealthCheckRequest, reflection_pb2.ServerReflectionRequest
REQUESTS: dict[str, Descriptor] = {
    "/grpc.health.v1.Health/Check": HEALTH.DESCRIPTOR,
    "/grpc.health.v1.Health/Watch": HEALTH.DESCRIPTOR,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": REFLECTION.DESCRIPTOR,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": REFLECTION.DESCRIPTOR,
}
"""Messages of RPCs that no dialect's descriptors have."""


def rpcs() -> dict[str, Descriptor]:
    """Each RPC of every dialect, and those of every gRPC listener, with its request."""
    found = dict(REQUESTS)
    for spec in SPECS:
        for path in spec.rpcs:
            service, _, method = path[1:].rpartition("/")
            described = load(spec.name).pool.FindServiceByName(service)
            found[path] = described.methods_by_name[method].input_type
    return found


def rpc_requests(path: str, message: Descriptor, size: int, some: int = 0) -> Iterator[Rpc]:
    """One message of each shape, and streams of many; with `some` so many of them."""
    shapes: list[tuple[str, Callable[[], bytes]]] = [
        (name, lambda data=data: prefix(data)) for name, data in message_shapes(message, size)
    ]
    begun, every = beginning(message), f"{path}"
    shapes += [
        ("empty messages", lambda: repeat(prefix(b""), size)),
        ("messages of a name", lambda: repeat(prefix(begun), size)),
        ("unknown messages in a stream", lambda: repeat(prefix(tag(500, VARINT) + b"\1"), size)),
        ("half a message", lambda: b"\0" + size.to_bytes(4, "big") + bytes(size // 2)),
        ("a stream of garbage", lambda: random.Random(3).randbytes(size)),
    ]
    for name, make in picked(shapes, some, every):
        yield Rpc(name, path, make())
