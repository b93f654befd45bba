"""Deployments that tests serve: the echo of the conformance cases, and their two customised forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

INFERER = """
import time
from pathlib import Path
from grps_framework.apis import grps_pb2
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.context.context import GrpsContext
from grps_framework.logger.logger import clogger
from grps_framework.monitor.monitor import app_monitor
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class Echo(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)
        self.tag = args["tag"]

    def load(self):
        clogger.info("loaded %s", self.tag)
        return True

    def infer(self, inp, context: GrpsContext):
        if context.get_http_request() is not None:
            return self.by_http(context)
        said = inp.str_data if inp.WhichOneof("data_oneof") == "str_data" else ""
        word, _, text = said.partition(":")
        if word == "raise":
            raise ValueError(text)
        if word == "err":
            context.set_err_msg(text)
            return None
        if word == "hold":
            while not Path(text).exists() and not context.if_disconnected():
                time.sleep(0.001)
        if word == "gone":
            Path(text + ".began").touch()
            while not context.if_disconnected():
                time.sleep(0.001)
            Path(text).touch()
            return inp
        if context.if_streaming():
            return self.stream(inp, said, context)
        if said == "none":
            return None
        if word == "count":
            app_monitor.inc("seen(times)", 2)
            for name in ("avg", "max", "min", "cdf"):
                for value in (1.0, 4.0):
                    getattr(app_monitor, name)("took", value)
        if said == "tag":
            return GrpsMessage(str_data=self.tag)
        if said == "bin":
            return GrpsMessage(bin_data=b"\\x00\\xffbin")
        return GrpsMessage() if said == "empty" else inp

    def stream(self, inp, said, context):
        if said == "binstream":
            for data in (b"ab", b"cd"):
                context.stream_respond(GrpsMessage(bin_data=data))
            return None
        word, _, count = said.partition("*")
        if count.isdigit():  # folder*3: three messages, the next when the folder has a file named as the last
            for n in range(int(count)):
                context.stream_respond(GrpsMessage(str_data=str(n)))
                while not Path(word, str(n)).exists() and not context.if_disconnected():
                    time.sleep(0.05)
            return None
        if said == "big":
            for n in range(200):
                context.stream_respond(GrpsMessage(bin_data=bytes([n]) * (1 << 18)))
            return None
        if said == "final":
            context.stream_respond(GrpsMessage(str_data="the last"), final=True)
            context.stream_respond(GrpsMessage(str_data="never sent"))
            return None
        for n in range(3):
            context.stream_respond(GrpsMessage(str_data=f"{said}-{n}"))
        if said == "serr":
            raise ValueError("midstream")
        return None

    def by_http(self, context):
        request = context.get_http_request()
        body = request.get_data().decode()
        if body == "raise":
            raise RuntimeError("boom")
        if body == "nothing":
            return None
        if body == "nonsense":
            context.set_http_response(object())
        if body == "err":
            context.set_err_msg("mymsg")
            return None
        if body == "response":
            from flask import Response

            made = Response("not found here", 404, {"X-Own": "yes"}, mimetype="text/css")
            made.set_cookie("a", "1")
            made.set_cookie("b", "2")
            context.set_http_response(made)
            return None
        if body == "streamed":
            from flask import Response

            context.set_http_response(Response((part for part in ("a", "b")), content_type="text/x-parts"))
            return None
        if body == "members":
            told = (request.method, request.path, request.args.getlist("q"), request.headers["X-Own"],
                    request.mimetype, request.content_length, request.is_json)
            context.set_http_response(repr(told))
            return None
        if request.mimetype == "application/x-www-form-urlencoded":
            context.set_http_response(repr({name: request.form[name] for name in request.form}))
            return None
        if body == "tuple":
            context.set_http_response(("made", 201, {"X-Own": "yes", "Content-Type": "text/css"}))
            return None
        if body == "smuggle":
            context.set_http_response((b"x", 200, {"X-Own": "a\\r\\nSet-Cookie: b", "Content-Length": "7"}))
            return None
        word, _, text = body.partition(":")
        if word == "hold":
            while not Path(text).exists() and not context.if_disconnected():
                time.sleep(0.001)
        if word == "gone":
            context.customized_http_stream_respond("begun;")
            while not context.if_disconnected():
                time.sleep(0.001)
            Path(text).touch()
            return None
        if word == "odd":
            odd = eval(text)
            if context.if_streaming():
                context.customized_http_stream_respond(odd)
            else:
                context.set_http_response(odd)
            return None
        if context.if_streaming():
            for n in range(3):
                context.customized_http_stream_respond(f"{body}-{n};")
            if body == "serr":
                raise ValueError("midstream")
            return None
        if body == "tag":
            context.set_http_response(self.tag)
        elif request.args.get("json") is not None:
            context.set_http_response((str(request.get_json()["x"]), 200, {"Content-Type": "text/plain"}))
        else:
            context.set_http_response(request.get_data())
        return None

    def batch_infer(self, inp, contexts):
        return [self.infer(one, context) for one, context in zip(inp, contexts)]


inferer_register.register("echo", Echo())
"""
CONVERTER = '''
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.converter.converter import Converter, converter_register


class Doubling(Converter):
    """"2" -> 2.0 -> "4.0": QuickStart's y = 2x."""

    def init(self, path=None, args=None):
        super().init(path, args)
        self.word = (args or {}).get("word", "")

    def preprocess(self, inp, context):
        context.put_user_data("asked", inp.str_data)
        return inp

    def postprocess(self, inp, context):
        if inp is None:  # of a batch whose others went well
            return None
        asked = context.get_user_data("asked")
        return GrpsMessage(str_data=f"{self.word}{inp.str_data}{asked}")

    def batch_preprocess(self, inps, contexts):
        return [self.preprocess(inp, context) for inp, context in zip(inps, contexts)]

    def batch_postprocess(self, inp, contexts):
        return [self.postprocess(one, context) for one, context in zip(inp, contexts)]


converter_register.register("twice", Doubling())
'''


def echo_model(version: str, tag: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "echo",
        "version": version,
        "device": "cpu",
        "inferer_type": "customized",
        "inferer_name": "echo",
        "inferer_path": None,
        "inferer_args": {"tag": tag},
        "converter_type": "none",
        "batching": {"type": "none"},
        **more,
    }


DYNAMIC = {"type": "dynamic", "max_batch_size": 4, "batch_timeout_us": 20000}


def write(
    folder: Path,
    models: list[dict[str, Any]] | None = None,
    dag: list[str] | None = None,
    custom: dict[str, Any] | None = None,
    **server: Any,
) -> Path:
    """A deployment; its folder."""
    models = models or [echo_model("1.0.0", "A"), echo_model("2.0.0", "B", batching=DYNAMIC)]
    names = dag or [f"{models[0]['name']}-{models[0]['version']}"]
    nodes = [{"name": f"node-{n}", "type": "model", "model": name} for n, name in enumerate(names)]
    face: dict[str, Any] = {"framework": "http+grpc", "host": "127.0.0.1", "port": "7080,7081"}
    if custom is not None:
        face["customized_predict_http"] = custom
    (folder / "conf").mkdir(parents=True)
    (folder / "src").mkdir()
    inference = {"models": models, "dag": {"type": "sequential", "name": "your_dag", "nodes": nodes}}
    (folder / "conf" / "inference.yml").write_text("# echo\n" + yaml.safe_dump(inference))
    (folder / "conf" / "server.yml").write_text(
        yaml.safe_dump({"interface": face, "max_connections": 1000, "max_concurrency": 300, **server})
    )
    (folder / "src" / "customized_inferer.py").write_text(INFERER)
    (folder / "src" / "customized_converter.py").write_text(CONVERTER)
    return folder
