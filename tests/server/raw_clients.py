"""One raw V2 request over HTTP, without a client library: tensors as bytes behind the JSON."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from typing import Any

import numpy as np

_DATATYPES = {"float32": "FP32", "float16": "FP16", "int64": "INT64", "uint8": "UINT8"}


def ask(address: str, model: str, x: str, array: np.ndarray, y: str) -> tuple[int, Any]:
    """(200, the output as float32) or (status, the error's text)."""
    size = array.nbytes
    tensor = {"name": x, "datatype": _DATATYPES[array.dtype.name], "shape": list(array.shape)}
    head = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": size}}],
        "outputs": [{"name": y, "parameters": {"binary_data": True}}],
    }
    text = json.dumps(head).encode()
    connection = HTTPConnection(address, timeout=60)
    try:
        headers = {"Inference-Header-Content-Length": str(len(text))}
        connection.request("POST", f"/v2/models/{model}/infer", text + array.tobytes(), headers)
        reply = connection.getresponse()
        body = reply.read()
    finally:
        connection.close()
    if reply.status != 200:
        return reply.status, json.loads(body)["error"]
    cut = int(reply.headers["Inference-Header-Content-Length"])
    told = json.loads(body[:cut])["outputs"][0]
    return 200, np.frombuffer(body[cut:], np.float32).reshape(told["shape"])
