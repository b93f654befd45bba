"""The Helm chart, and the manifests that are made of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.cli.worker import worker
from fastserve.repository.model_config import NativeConfig
from fastserve.settings import load_settings
from fastserve.settings.model_options import read_address
from fastserve.workers.remote.keys import read_key, write_keys
from tests.deploy.manifests import check_hardened, check_pod, check_release, check_starts, pods_of
from tools import render_chart

ROOT = Path(__file__).resolve().parents[2]
VALUES = yaml.safe_load((render_chart.CHART / "values.yaml").read_text())
SCHEMA = json.loads((render_chart.CHART / "values.schema.json").read_text())
# Kinds of custom resources: no schema of Kubernetes has them.
CUSTOM = ("ServiceMonitor", "ScaledObject")


def manifests(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((render_chart.FOLDER / name).read_text()) if one]


@pytest.mark.parametrize("name", render_chart.RENDERED)
def test_manifests_are_of_this_chart(name: str) -> None:
    head = (render_chart.FOLDER / name).read_text().partition("\n")[0]
    assert head.endswith(render_chart.digest()), "run: python3 tools/render_chart.py HELM"
    assert {path.name for path in render_chart.FOLDER.iterdir()} == set(render_chart.RENDERED)


@pytest.mark.parametrize("name", render_chart.RENDERED)
def test_what_manifests_name_is_there(name: str, tmp_path: Path) -> None:
    found = [one for one in manifests(name) if "-workers" not in one["metadata"]["name"]]
    check_release(found)
    (pod,) = (pod for one in found for pod in pods_of(one))
    check_pod(pod)
    check_hardened(pod)
    (config,) = (one for one in found if one["kind"] == "ConfigMap")
    (tmp_path / "fastserve.yaml").write_text(config["data"]["fastserve.yaml"])
    assert load_settings(tmp_path / "fastserve.yaml").log.format == "json"
    check_starts(pod, tmp_path / "fastserve.yaml")


def test_each_switch_has_its_manifest() -> None:
    kinds = {name: {one["kind"] for one in manifests(name)} for name in render_chart.RENDERED}
    base = {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert kinds["plain.yaml"] == base
    assert kinds["scaled.yaml"] == base | {"HorizontalPodAutoscaler", "ServiceMonitor"}
    assert kinds["keda.yaml"] == base | {"ScaledObject"}


def test_a_rollout_takes_nothing_away_before_its_successor_is_ready() -> None:
    (deployment,) = (one for one in manifests("plain.yaml") if one["kind"] == "Deployment")
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] == 0
    assert rolling["maxSurge"]


def test_remote_workers_reach_their_server_with_their_half_of_the_keys(tmp_path: Path) -> None:
    found = {(one["kind"], one["metadata"]["name"]): one for one in manifests("workers.yaml")}
    server, workers = found["Deployment", "fastserve"], found["Deployment", "fastserve-workers"]
    (pod,) = pods_of(workers)
    check_pod(pod)
    check_hardened(pod)
    assert pod["terminationGracePeriodSeconds"] >= NativeConfig(backend="onnx").run_timeout_ms / 1000 + 5
    # The command is one that the program takes, and its addresses are those of the service.
    (container,) = pod["containers"]
    name, *arguments = container["args"]
    assert name == worker.name
    given = worker.make_context(name, arguments).params
    (address,) = given["addresses"]
    host, ports = read_address(address)
    service = found["Service", host]
    assert [(port["port"], port["targetPort"]) for port in service["spec"]["ports"]] == [
        (p, p) for p in ports
    ]
    assert service["spec"]["publishNotReadyAddresses"]  # a server is ready after its workers
    # The service and both policies are of these pods and these ports.
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in (server, workers)]
    assert service["spec"]["selector"].items() <= labels[0].items()
    assert not service["spec"]["selector"].items() <= labels[1].items()
    inwards, outwards = (found["NetworkPolicy", f"fastserve-workers{end}"]["spec"] for end in ("-server", ""))
    assert workers["spec"]["selector"]["matchLabels"].items() <= labels[1].items()
    for policy, own, rule, peer, other in (
        (inwards, labels[0], inwards["ingress"][0], "from", labels[1]),
        (outwards, labels[1], outwards["egress"][0], "to", labels[0]),
    ):
        assert policy["podSelector"]["matchLabels"].items() <= own.items()
        assert rule[peer][0]["podSelector"]["matchLabels"].items() <= other.items()
        assert [port["port"] for port in rule["ports"]] == list(ports)
    # Each side has its own key of the pair, and the program takes that for this side.
    for one, side in ((server, "server"), (workers, "worker")):
        (volume,) = (v for p in pods_of(one) for v in p["volumes"] if "secret" in v)
        assert volume["secret"]["items"] == [{"key": f"{side}.key", "path": f"{side}.key"}]
    paths = {path.name: path for path in write_keys(tmp_path)}
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "key")
    assert given["key"] == Path(mount["mountPath"]) / "worker.key"
    assert read_key(paths["worker.key"], "worker").role == "worker"
    # The next server gets the workers when this one has let them go.
    assert server["spec"]["strategy"] == {"type": "Recreate"}
    assert server["spec"]["replicas"] == 1


def test_every_value_is_in_the_schema_and_used() -> None:
    assert set(VALUES) == set(SCHEMA["properties"]) - {"global"}
    for name, value in VALUES.items():
        described = SCHEMA["properties"][name]
        if described.get("additionalProperties") is False:
            assert set(value) == set(described["properties"]), name
    used = "".join(path.read_text() for path in (render_chart.CHART / "templates").iterdir())
    for name, value in VALUES.items():
        inner = SCHEMA["properties"][name].get("additionalProperties") is False
        for path in [f"{name}.{key}" for key in value] if inner else [name]:
            assert re.search(rf"\.Values\.{re.escape(path)}\b", used), path


def helm() -> str:
    found = shutil.which("helm")
    if found is None:
        pytest.skip("there is no helm")
    return found


def test_helm_renders_these_manifests(tmp_path: Path) -> None:
    render_chart.main(helm(), tmp_path)
    for name in render_chart.RENDERED:
        assert (tmp_path / name).read_text() == (render_chart.FOLDER / name).read_text(), name


def test_helm_lints_the_chart() -> None:
    done = subprocess.run(
        [helm(), "lint", "--strict", str(render_chart.CHART)], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("drain.delaySeconds=-1", "drain/delaySeconds"),
        ("nonsense=1", "nonsense"),
        ("config.drain_s=1", "config"),
        ("ports.http=80", "ports/http"),
        ("keda.prometheus=here", "keda/prometheus"),
        ("workers.ports.first=80", "workers/ports/first"),
        ("workers.secret=keys", "allowed: replicas=1 and no autoscaling"),
    ],
)
def test_a_wrong_value_is_refused(value: str, told: str) -> None:
    command = [helm(), "template", "x", str(render_chart.CHART), "--set", value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert told in done.stderr


def test_two_autoscalers_are_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render_chart.render(helm(), ("autoscaling.enabled=true", "keda.enabled=true"))
    assert "given both, allowed: one of them" in caught.value.stderr


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("name", render_chart.RENDERED)
def test_kubernetes_takes_the_manifests(name: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="there are no schemas of Kubernetes")
    for manifest in manifests(name):
        if manifest["kind"] not in CUSTOM:
            validate.validate(manifest, version, strict=True)
