"""Deployments: inference.yml and server.yml read, checked and compiled; dags, converters, other inferers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fastserve.errors import ConfigError, ServeError
from fastserve.repository.grps_config import read_deployment
from fastserve.repository.layout import Layout
from fastserve.settings.grps import grps_overrides, read_server_file
from tests.backends import models as onnx_models
from tests.dialects.grps import deployments
from tests.dialects.grps.deployments import DYNAMIC, echo_model
from tests.dialects.grps.rig import JSON, deployed, settings_of
from tests.running import until

TWICE = {"converter_type": "customized", "converter_name": "twice"}
NO_MESSAGE = b"Output type must be GrpsMessage."
BOTH = {"name": "both", "converter_args": {"word": "<"}, **TWICE}


def test_a_dag_of_several_nodes(tmp_path: Path) -> None:
    """Each node hands its message on; the last streams, and answers a customised call."""
    nodes = [echo_model("1.0.0", "A", **BOTH, batching=DYNAMIC), echo_model("1.0.0", "B")]
    custom = {"path": "/custom", "customized_body": True}
    folder = deployments.write(tmp_path / "d", nodes, ["both-1.0.0", "echo-1.0.0"], custom)
    with deployed(settings_of(folder)) as served:
        assert served.predict({"str_data": "x"}).json["str_data"] == "<xx"
        assert served.call("Predict", str_data="x").str_data == "<xx"
        assert [part.str_data for part in served.stream(str_data="x")] == ["<xx-0", "<xx-1", "<xx-2"]
        for word, text in (("err", "y"), ("raise", "ValueError: y")):
            reply = served.predict({"str_data": f"{word}:y"})
            assert (reply.code, reply.message) == (500, text)
        assert served.predict({"str_data": "none"}).message == "Output type must be GrpsMessage."
        assert served.predict({"str_data": "x", "model": "both-1.0.0"}).json["str_data"] == "<xx"
        assert "str_data: x" not in served.ask("GET", "/grps/v1/metadata/server").json["str_data"]
        assert (
            served.ask("POST", "/custom", b"hello").body == NO_MESSAGE
        )  # the first node has none to hand on
        assert served.predict({"str_data": "echo", "model": "dag.your_dag"}).json["str_data"] == "<echoecho"


def test_converters_in_a_batch(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder = deployments.write(tmp_path / "d", [echo_model("1.0.0", "A", **BOTH, batching=DYNAMIC)])
    with deployed(settings_of(folder)) as served, ThreadPoolExecutor(8) as pool:
        asked = [f"v{n}" for n in range(24)] + ["err:me"]
        replies = list(pool.map(lambda text: served.predict({"str_data": text}), asked))
        assert [r.json.get("str_data") for r in replies[:-1]] == [f"<{t}{t}" for t in asked[:-1]]


def test_an_onnx_model_takes_tensors(tmp_path: Path) -> None:
    node = {"name": "net", "version": 1, "inferer_type": "onnx", "inferer_path": "./data/net.onnx"}
    folder = deployments.write(tmp_path / "d", [node])
    (folder / "data").mkdir()
    made = onnx_models.affine(tmp_path)
    (made / "model.onnx").rename(folder / "data" / "net.onnx")
    given = {"name": "x", "dtype": "DT_FLOAT32", "shape": [2, 3], "flat_float32": [0, 1, 2, 3, 4, 5]}
    with deployed(settings_of(folder)) as served:
        for _ in range(2):
            y, z = served.predict({"gtensors": {"tensors": [given]}}).json["gtensors"]["tensors"]
            assert (y["flat_float32"], z["flat_float32"]) == ([1, 3, 5, 7, 9, 11], [9, 27])
        assert "takes no str_data" in served.predict({"str_data": "x"}).message


def test_torch_models_take_tensors(tmp_path: Path) -> None:
    """A TorchScript program by the tensors of inferer_args, an exported one by its own."""
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.copy_(2 * torch.eye(3))
        net.bias.fill_(1)
    row = {"dtype": "float32", "shape": [3]}
    batching = {"type": "dynamic", "max_batch_size": 8, "batch_timeout_us": 1000}
    folder = deployments.write(
        tmp_path / "d",
        [
            {
                **{"name": "script", "version": "1.0.0", "inferer_type": "torch", "batching": batching},
                **{
                    "inferer_path": "./data/net.pt",
                    "inferer_args": {"inputs": {"x": row}, "outputs": {"y": row}},
                },
            },
            {"name": "program", "version": 2, "inferer_type": "torch", "inferer_path": "data/net.pt2"},
        ],
        ["script-1.0.0"],
    )
    (folder / "data").mkdir()
    torch.jit.script(net).save(str(folder / "data/net.pt"))
    program = torch.export.export(net, (torch.zeros(2, 3),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, folder / "data/net.pt2")
    given = {"dtype": "DT_FLOAT32", "shape": [2, 3], "flat_float32": [0, 1, 2, 3, 4, 5]}
    with deployed(settings_of(folder)) as served:
        for model in ("script-1.0.0", "program-2"):
            for _ in range(2):
                asked = {"model": model, "gtensors": {"tensors": [given]}}
                reply = served.predict(asked)
                assert reply.code == 200, (model, reply.message)
                (y,) = reply.json["gtensors"]["tensors"]
                assert (y["shape"], y["flat_float32"]) == ([2, 3], [1, 3, 5, 7, 9, 11])


@pytest.mark.parametrize(
    ("node", "told"),
    [
        ({"inferer_type": "torch", "inferer_path": "net.pt"}, "inferer_args: given None, allowed: {inputs:"),
        ({"inferer_type": "torch", "inferer_path": "../net.pt2"}, "allowed: a .pt2 or .pt file inside"),
        (
            {"inferer_type": "torch", "inferer_path": "net.onnx"},
            "given 'net.onnx', allowed: a .pt2 or .pt file",
        ),
        ({"inferer_type": "onnx", "inferer_path": "/net.onnx"}, "allowed: an .onnx file inside"),
    ],
)
def test_a_model_of_tensors_needs_a_file_that_describes_it(
    tmp_path: Path, node: dict[str, Any], told: str
) -> None:
    folder = deployments.write(tmp_path / "d", [{"name": "net", "version": 1, **node}])
    with pytest.raises(ConfigError) as caught:
        read_deployment(folder).config("net-1")
    assert told in str(caught.value)


def edited(folder: Path, change: Any) -> Path:
    path = folder / "conf" / "inference.yml"
    raw = yaml.safe_load(path.read_text())
    change(raw)
    path.write_text(yaml.safe_dump(raw))
    return folder


WRONG = {
    "twice": (lambda raw: raw["models"].append(raw["models"][0]), "echo-1.0.0 is there twice"),
    "no-path": (
        lambda raw: raw["models"][0].update(
            inferer_type="torch", converter_type="customized", converter_name="c"
        ),
        "converter_type: given customized, allowed: none, with inferer_type torch",
    ),
    "tensorrt": (lambda raw: raw["models"][0].update(inferer_type="tensorrt"), "tensorrt is not run here"),
    "no-inferer": (lambda raw: raw["models"][0].update(inferer_name=None), "inferer_name: given nothing"),
    "no-converter": (lambda raw: raw["models"][0].update(converter_type="customized"), "converter_name"),
    "torch-converter": (
        lambda raw: raw["models"][0].update(converter_type="torch"),
        "allowed: customized or none",
    ),
    "dag": (lambda raw: raw["dag"]["nodes"][0].update(model="x-1"), "dag: model: given 'x-1'"),
    "dag-type": (lambda raw: raw["dag"].update(type="graph"), "dag.type"),
    "no-dag": (lambda raw: raw.pop("dag"), "dag"),
    "no-models": (lambda raw: raw.update(models=[]), "models"),
    "typo": (lambda raw: raw["models"][0].update(inferrer="x"), "inferrer"),
    "batch": (lambda raw: raw["models"][0]["batching"].update(max_batch_size=0), "max_batch_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_inference_yml_may_not_say(tmp_path: Path, case: str) -> None:
    change, words = WRONG[case]
    with pytest.raises(ConfigError, match=r"inference\.yml") as caught:
        read_deployment(edited(deployments.write(tmp_path / "d"), change))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("face", "words"),
    [
        ({"framework": "http+brpc"}, "http+brpc"),
        ({"host": "localhost"}, "host"),
        ({"port": "7080"}, "allowed: HTTP_PORT,RPC_PORT"),
        ({"port": "7080,70810"}, "up to 65535"),
        ({"customized_predict_http": {"path": "no"}}, "path"),
    ],
)
def test_what_server_yml_may_not_say(face: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.yml") as caught:
        grps_overrides(read_server_file({"interface": face}))
    assert words in str(caught.value)


def test_server_yml_as_settings() -> None:
    raw = {"interface": {"framework": "http", "host": "0.0.0.0", "port": 9000}, "log": {"log_dir": "./logs"}}
    said, ignored = grps_overrides(read_server_file({**raw, "max_connections": 7}))
    assert said["http"] == [{"address": "0.0.0.0:9000", "dialects": ["grps"]}]
    assert (said["grpc"], said["limits.connections"], ignored) == ([], 7, ["log"])


def test_code_that_cannot_be_loaded_fails_its_model(tmp_path: Path) -> None:
    folder = deployments.write(tmp_path / "d", [echo_model("1.0.0", "A", inferer_name="nobody")])
    words = r"inferer_name: given 'nobody', allowed: what the project registered \(echo\)"
    with pytest.raises(ServeError, match=words), deployed(settings_of(folder)):
        raise AssertionError("it started")


def test_settings_where_the_originals_differ(tmp_path: Path) -> None:
    options = {
        "http_status": "always_200",
        "unknown_model_code": 404,
        "int64": "number",
        "json_charset": False,
        "ndarray_of_several": "first",
        "server_metadata_first": "server",
        "empty_str_data": "reject",
        "grpc_not_ready_code": 403,
        "shared_ready": False,
        "bare_names": True,
    }
    with deployed(settings_of(deployments.write(tmp_path / "d"), **options)) as served:
        reply = served.predict({"str_data": "x", "model": "no-1"})
        assert (reply.status, reply.code, reply.headers["content-type"]) == (200, 404, "application/json")
        tensor = {"dtype": 5, "shape": [1], "flat_int64": ["9007199254740993"]}
        answer = served.predict({"gtensors": {"tensors": [tensor]}})
        assert b'"flat_int64":[9007199254740993]' in answer.body
        pair = [{"dtype": 7, "shape": [1], "flat_float32": [n]} for n in (1, 2)]
        assert served.predict({"gtensors": {"tensors": pair}}, "?return-ndarray=true").json["ndarray"] == [
            1.0
        ]
        text = served.ask("GET", "/grps/v1/metadata/server").json["str_data"]
        assert text.index("max_connections") < text.index("models:")
        assert served.predict({"str_data": ""}).code == 400
        assert served.call("CheckReadiness").status.code == 403
        assert served.ask("GET", "/grps/v1/health/online").status == 200
        assert served.call("CheckReadiness").status.code == 403
        assert served.call("Online").status.code == served.call("CheckReadiness").status.code == 200


def test_how_models_are_run_is_set_as_for_any(tmp_path: Path) -> None:
    settings = settings_of(deployments.write(tmp_path / "d"))
    layout = Layout(msgspec.structs.replace(settings, model_defaults={"max_queue_rows": 7}))
    for name in ("echo-1.0.0", "echo-2.0.0"):
        for found in (layout.scan()[name], layout.scan_one(name)):
            assert found is not None
            assert found.config is not None
            assert (found.config.max_queue_rows, found.config.options.decoupled) == (7, True)
    assert layout.scan_one("echo") is None


def test_metrics_of_the_projects_own(tmp_path: Path) -> None:
    with deployed(settings_of(deployments.write(tmp_path / "d", [echo_model("1.0.0", "A")]))) as served:
        for _ in range(2):
            assert served.predict({"str_data": "count:"}).status == 200
        wanted = {
            'grps_app_inc{name="seen(times)"} 4',
            'grps_app_avg{name="took"} 2.5',
            'grps_app_max{name="took"} 4',
            'grps_app_min{name="took"} 1',
            'grps_app_cdf_count{name="took"} 4',
        }

        def shown() -> bool:
            lines = served.ask("GET", "/metrics").body.decode().splitlines()
            return wanted <= {line.removesuffix(".0").removesuffix(".000000") for line in lines}

        until(shown, "\n".join(wanted))


def test_models_by_name_or_name_and_version(tmp_path: Path) -> None:
    with deployed(settings_of(deployments.write(tmp_path / "d"))) as served:
        for name, version in (("echo", "1.0.0"), ("echo-2.0.0", "2.0.0")):
            reply = served.ask("POST", "/grps/v1/metadata/model", f'{{"str_data":"{name}"}}'.encode(), JSON)
            assert yaml.safe_load(reply.json["str_data"])["version"] == version
        assert served.ask("POST", "/grps/v1/metadata/model", b"{}", JSON).code == 400
        assert (
            served.ask("POST", "/grps/v1/metadata/model", b"{}", {"Content-Type": "text/xml"}).status == 415
        )
        assert served.call("ModelMetadata").status.msg == "The model name is empty."
        assert served.call("ModelMetadata", str_data="no").status.code == 404
