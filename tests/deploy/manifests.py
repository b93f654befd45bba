"""Checks of manifests that need no schema: what they name exists, and settings are the server's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastserve.server.dialect_selection import refuse_open_places
from fastserve.server.server import STOP_S
from fastserve.settings import load_settings
from fastserve.settings.sources import OTHER_VARIABLES, list_variables, read_environment

Manifest = dict[str, Any]
PROBES = {"startupProbe": "startup", "readinessProbe": "ready", "livenessProbe": "live"}


def pods_of(manifest: Manifest) -> Iterator[Manifest]:
    """Yield each pod template's spec, wherever it stands."""
    for key, value in manifest.items():
        if key == "template" and isinstance(value, dict) and "spec" in value:
            yield value["spec"]
        elif isinstance(value, dict):
            yield from pods_of(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    yield from pods_of(item)


def check_pod(pod: Manifest) -> None:
    """Volumes, ports and probes that the pod's containers name are there; its grace covers the drain."""
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    mounted = {mount["name"] for one in pod["containers"] for mount in one.get("volumeMounts", [])}
    assert mounted == volumes
    for one in pod["containers"]:
        ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
        variables = {entry["name"]: entry.get("value") for entry in one.get("env", [])}
        ours = {name for name in variables if name.startswith("FASTSERVE_")}
        assert ours <= {*list_variables(), *OTHER_VARIABLES}
        if "FASTSERVE_HTTP" not in variables:
            continue
        assert variables["FASTSERVE_HTTP"] == f"0.0.0.0:{ports['http']}"
        assert variables["FASTSERVE_GRPC"] == f"0.0.0.0:{ports['grpc']}"
        for probe, path in PROBES.items():
            assert one[probe]["httpGet"] == {"path": f"/healthz/{path}", "port": "http"}
        # Not ready is seen, by the kubelet and then by proxies, before connections are refused.
        delay, grace = (float(variables[f"FASTSERVE_DRAIN_{name}S"] or 0) for name in ("DELAY_", ""))
        assert one["readinessProbe"]["failureThreshold"] == 1
        assert delay >= 2 * one["readinessProbe"]["periodSeconds"] + 2
        assert pod["terminationGracePeriodSeconds"] >= delay + grace + STOP_S + 5


def check_starts(pod: Manifest, config: Path | None = None) -> None:
    """A server starts with these settings: there are keys, or somebody has said that there need be none."""
    for one in pod["containers"]:
        variables = {entry["name"]: entry["value"] for entry in one.get("env", [])}
        if "FASTSERVE_HTTP" in variables:
            refuse_open_places(load_settings(config, None, read_environment(variables)))


def check_hardened(pod: Manifest) -> None:
    """It runs as nobody in particular, writes to /tmp alone, and asks for its resources."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] >= 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for one in pod["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(one["resources"]["requests"])
        assert "memory" in one["resources"]["limits"]
        writable = [m["mountPath"] for m in one["volumeMounts"] if not m.get("readOnly")]
        assert writable == ["/tmp"]


def check_release(manifests: list[Manifest]) -> None:
    """Everything that one manifest names is in another, or in the cluster by its own word."""
    by_kind: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        by_kind.setdefault(manifest["kind"], []).append(manifest)
    (deployment,) = by_kind["Deployment"]
    template = deployment["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    names = {port["name"] for one in pod["containers"] for port in one["ports"]}
    config_maps = {one["metadata"]["name"] for one in by_kind["ConfigMap"]}
    assert {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v} == config_maps
    for service in by_kind["Service"]:
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for one in by_kind.get(kind, []):
            selector = one["spec"].get("selector") or one["spec"]["podSelector"]
            assert selector["matchLabels"].items() <= labels.items()
    for policy in by_kind.get("NetworkPolicy", []):
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} <= names
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for one in by_kind.get(kind, []):
            assert one["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
            assert "replicas" not in deployment["spec"]  # an upgrade would undo what was scaled
    for monitor in by_kind.get("ServiceMonitor", []):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        absent = monitor["spec"]["selector"]["matchExpressions"]
        (key,) = (one["key"] for one in absent)
        found = [s for s in by_kind["Service"] if wanted.items() <= s["metadata"]["labels"].items()]
        (service,) = (s for s in found if key not in s["metadata"]["labels"])  # each pod is scraped once
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
