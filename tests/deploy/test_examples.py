"""Files that only their own program could run: what they name is there, and agrees with the other files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import check_pod, check_starts, pods_of
from tools import render_chart

ROOT = Path(__file__).resolve().parents[2] / "deploy"


def find(tree: Any, key: str) -> Iterator[Any]:
    """Yield every value of a key, wherever it stands."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from find(value, key)
    elif isinstance(tree, list):
        for item in tree:
            yield from find(item, key)


def test_envoy_hashes_as_nginx_does_and_asks_the_charts_pods() -> None:
    whole = yaml.safe_load((ROOT / "proxies/envoy.yaml").read_text())
    resources = whole["static_resources"]
    clusters = {one["name"]: one for one in resources["clusters"]}
    assert set(find(resources["listeners"], "cluster")) == set(clusters)
    (header,) = set(re.findall(r"\$http_(\w+) consistent", (ROOT / "proxies/nginx.conf").read_text()))
    assert set(find(resources, "header_name")) == {header.replace("_", "-")}
    scaled = [one for one in yaml.safe_load_all((render_chart.FOLDER / "scaled.yaml").read_text()) if one]
    (pods,) = (one for one in scaled if one["kind"] == "Service" and one["spec"].get("clusterIP") == "None")
    ports = {port["name"]: port["port"] for port in pods["spec"]["ports"]}
    for name, kind in (("fastserve-http", "http"), ("fastserve-grpc", "grpc")):
        (place,) = find(clusters[name]["load_assignment"], "socket_address")
        assert place == {"address": pods["metadata"]["name"], "port_value": ports[kind]}
        assert clusters[name]["lb_policy"] == "RING_HASH"
        assert clusters[name]["load_assignment"]["cluster_name"] == name
    assert list(find(clusters["fastserve-http"], "path")) == ["/healthz/ready"]


def test_types_of_envoy_are_of_its_third_api() -> None:
    types = re.findall(r'"@type": (\S+?)}?$', (ROOT / "proxies/envoy.yaml").read_text(), re.MULTILINE)
    assert len(types) == 5
    assert all(re.fullmatch(r"type\.googleapis\.com/envoy(\.\w+)+\.v3\.\w+", one) for one in types)


def test_kuberays_cluster_is_whole() -> None:
    cluster = yaml.safe_load((ROOT / "ray/raycluster.yaml").read_text())
    pods = list(pods_of(cluster))
    assert len(pods) == 2
    for pod in pods:
        check_pod(pod)
        check_starts(pod)
    (server,) = (one for pod in pods for one in pod["containers"] if one["name"] == "fastserve")
    assert server["command"] + server["args"] == ["fastserve", "serve", "/models", "--ray", "auto"]
    images = {one["image"] for pod in pods for one in pod["containers"]}
    assert len(images) == 1  # the driver and its actors need the same Ray and the same fastserve
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_every_file_is_tested() -> None:
    """Each folder of deploy/ has a test that names its files."""
    assert {path.name for path in ROOT.iterdir()} == {
        *("container", "helm", "kserve", "kubernetes", "prometheus", "proxies", "ray", "systemd")
    }
    assert {path.name for path in (ROOT / "proxies").iterdir()} == {"nginx.conf", "envoy.yaml"}
    assert {path.name for path in (ROOT / "ray").iterdir()} == {"raycluster.yaml"}
