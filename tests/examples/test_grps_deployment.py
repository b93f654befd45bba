"""The deployment of docs/dialects/grps.md by its command, for clients of a process of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import started

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "grps_deployment"
CLIENT = """
import sys, grpc, grps_pb2, grps_pb2_grpc
stub = grps_pb2_grpc.GrpsServiceStub(grpc.insecure_channel(sys.argv[1]))
Message = grps_pb2.GrpsMessage
say = lambda message: print(message.status.code, message.status.msg, message.str_data)
say(stub.CheckLiveness(Message()))
say(stub.CheckReadiness(Message()))
say(stub.Online(Message()))
say(stub.CheckReadiness(Message()))
say(stub.Predict(Message(str_data="21", model="double-1.0.0")))
say(stub.Predict(Message(str_data="21")))
say(stub.Predict(Message(str_data="none")))
for part in stub.PredictStreaming(Message(str_data="21")):
    say(part)
tensor = grps_pb2.GenericTensor(name="x", dtype=grps_pb2.DT_FLOAT32, shape=[2], flat_float32=[1, 1.5])
asked = Message(model="double-1.0.0", gtensors=grps_pb2.GenericTensorData(tensors=[tensor]))
print(list(stub.Predict(asked).gtensors.tensors[0].flat_float32))
print(stub.ServerMetadata(Message()).str_data.count("double_in_words"))
print("inferer_name: words" in stub.ModelMetadata(Message(str_data="words")).str_data)
"""
SAID = """200 OK
503 Service Unavailable
200 OK
200 OK
200 OK 42
200 OK four two
500 ValueError: could not convert string to float: 'none'
200 OK four
200 OK two
[2.0, 3.0]
1
True
"""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, str]]:
    """The addresses for HTTP and gRPC."""
    listeners = ("--http", "127.0.0.1:0=grps", "--grpc", "127.0.0.1:0=grps")
    with started("grps", str(EXAMPLE), "--drain-delay-s", "0", *listeners) as process:
        assert process.stdout is not None
        places = dict(re.findall(r"(http|grpc)://(\S+)", process.stdout.readline().decode()))
        yield places["http"], places["grpc"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def ask(place: str, path: str, body: bytes, kind: str = "application/json") -> bytes:
    request = urllib.request.Request(f"http://{place}{path}", body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return bytes(reply.read())


def test_stubs_of_our_protos_in_a_process_of_their_own(served: tuple[str, str], tmp_path: Path) -> None:
    make = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos' / 'grps'}"]
    make += [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "grps.proto"]
    subprocess.run(make, check=True, cwd=tmp_path)
    (tmp_path / "client.py").write_text(CLIENT)
    done = subprocess.run(
        [sys.executable, "client.py", served[1]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [line.rstrip() for line in done.stdout.splitlines()] == SAID.splitlines(), done.stderr


def test_plain_http(served: tuple[str, str]) -> None:
    predict = "/grps/v1/infer/predict"
    answer = json.loads(ask(served[0], predict, b'{"str_data": "2", "model": "double-1.0.0"}'))
    assert answer == {"status": {"code": 200, "msg": "OK", "status": "SUCCESS"}, "str_data": "4"}
    assert json.loads(ask(served[0], predict, b'{"str_data": "2"}'))["str_data"] == "four"
    answer = json.loads(
        ask(served[0], predict + "?model=double-1.0.0&return-ndarray=true", b'{"ndarray": [1, 2.5]}')
    )
    assert answer["ndarray"] == [2.0, 5.0]
    assert ask(served[0], "/words?model=words-1.0.0", b"10", "text/plain") == b"one zero"
    assert ask(served[0], "/words?model=words-1.0.0&streaming=true", b"10", "text/plain") == b"one\nzero\n"
