"""Alert rules and the autoscaler's metric: every name and label in them is one that the server exports."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve.metrics import names
from tools import render_chart

FOLDER = Path(__file__).resolve().parents[2] / "deploy/prometheus"
# Written beside the registry's, with these labels (metrics/readiness.py).
BESIDES = {"fastserve_model_load_failed_since_seconds": {"model", "reason"}}
SCRAPED = {"job", "instance", "namespace", "pod", "le"}
PARTS = re.compile(r"_(bucket|sum|count)$")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def metric_labels(name: str) -> set[str]:
    """Return the labels of a series; fails for one that is not exported."""
    if name in BESIDES:
        return BESIDES[name]
    return set(names.CATALOGUE[name if name in names.CATALOGUE else PARTS.sub("", name)].labels)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_names_what_is_exported(rule: dict[str, Any]) -> None:
    asked = set(re.findall(r"\bfastserve_\w+", rule["expr"]))
    assert asked
    known = set.intersection(*({*metric_labels(name), *SCRAPED} for name in asked))
    named = set(re.findall(r"(\w+)=~?\"", rule["expr"]))
    named |= {label for by in re.findall(r"by \(([^)]+)\)", rule["expr"]) for label in by.split(", ")}
    said = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert named | said <= known
    if " by " in rule["expr"]:  # others are gone after the sum
        left = {label for by in re.findall(r"by \(([^)]+)\)", rule["expr"]) for label in by.split(", ")}
        assert said <= left
    assert rule["labels"]["severity"] in ("page", "warn")


def test_kinds_of_errors_and_causes_are_the_servers() -> None:
    from fastserve.errors import Kind

    text = (FOLDER / "alerts.yaml").read_text()
    (kinds,) = re.findall(r'status=~"([^"]+)"', text)
    assert set(kinds.split("|")) <= {kind.name for kind in Kind}
    (causes,) = re.findall(r'cause=~"([^"]+)"', text)
    page = (FOLDER.parents[1] / "docs/observability.md").read_text()
    (told,) = re.findall(r"Values of `cause` in `fastserve_rejects_total`: (.*)\.", page)
    assert set(causes.split("|")) <= set(re.findall(r"`(\w+)`", told))


def test_the_autoscalers_metric_is_the_adapters() -> None:
    (rule,) = yaml.safe_load((FOLDER / "adapter.yaml").read_text())["rules"]
    series = set(re.findall(r"\bfastserve_\w+", rule["metricsQuery"] + rule["seriesQuery"]))
    assert all(metric_labels(name) for name in series)
    scaled = yaml.safe_load_all((render_chart.FOLDER / "scaled.yaml").read_text())
    (scaler,) = (one for one in scaled if one["kind"] == "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    keda = yaml.safe_load_all((render_chart.FOLDER / "keda.yaml").read_text())
    (scaled_object,) = (one for one in keda if one["kind"] == "ScaledObject")
    query = scaled_object["spec"]["triggers"][0]["metadata"]["query"]
    assert set(re.findall(r"\bfastserve_\w+_seconds_\w+", query)) <= series


def test_the_expressions_of_the_page_name_what_is_exported() -> None:
    page = (FOLDER.parents[1] / "docs/observability.md").read_text()
    expressions = page.split("Useful expressions:")[1].split("```")[1]
    asked = set(re.findall(r"\bfastserve_\w+", expressions))
    assert {"fastserve_request_duration_seconds_bucket", "fastserve_queue_duration_seconds_bucket"} <= asked
    assert all("model" in metric_labels(name) for name in asked)


def test_promtool_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool")
    command = [promtool, "check", "rules", str(FOLDER / "alerts.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_tested() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"alerts.yaml", "adapter.yaml"}
