"""`pytest -p tests.skips`: a test that is skipped for a reason that is not listed here fails.

    make test ARGS="-p tests.skips"      # as CI does
    make test-extras                     # what needs an extra has it there

The last lines of a run count the skipped tests by what they need. An extra is what `make extras` installs:
tests that need it may be skipped in `make test`, and in `make test-extras` (`--extras FILE`) only where FILE
says why this machine cannot have it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Allowed:
    """Tests that may be skipped: what their ids begin with, and what they need."""

    tests: str
    needs: str
    extra: str = ""


GPU = "a CUDA device (make test-gpu)"
NO_GPU = "a machine without a CUDA device"
WHEEL = "an installed wheel (.ci/run, after this)"
ALLOWED = (
    Allowed("tests/gpu/", GPU),
    Allowed("tests/backends/llm/test_families.py::test_a_gpu_says_the_same", GPU),
    Allowed("tests/backends/llm/test_folders.py::", NO_GPU),
    Allowed("tests/backends/frameworks/test_torch.py::test_a_device_that_is_not_there_says_why", NO_GPU),
    Allowed("tests/ext/test_skinny_gemm.py::", "a CPU with AVX2: others take torch's products"),
    Allowed("tests/differential/", "a running Triton (make differential)"),
    Allowed("tests/net/http2/test_h2spec.py::", "h2spec, which no package index has (tools/build_h2spec.sh)"),
    Allowed("tests/net/test_transcripts.py::test_ipv6_and_dual_stack", "IPv6"),
    Allowed("tests/smoke/test_installed.py::", WHEEL),
    Allowed("tests/dialects/tfserving/test_writing.py::test_error_reply", "a status that is an error"),
    Allowed("tests/backends/frameworks/test_tensorflow.py::", "TensorFlow", "tensorflow"),
    Allowed("tests/recipes/test_recipes.py::test_recipe[tensorflow]", "TensorFlow", "tensorflow"),
    Allowed("tests/backends/tabular/", "XGBoost, LightGBM, CatBoost, Treelite, skops", "recipes"),
    Allowed("tests/examples/test_tabular.py::", "the same", "recipes"),
    Allowed("tests/dialects/openai/test_tools_langchain.py::", "langchain-openai", "recipes"),
    Allowed("tests/dialects/openai/test_litellm.py::", "litellm", "recipes"),
    Allowed("tests/repository/test_storage.py::test_a_cloud_", "fake-gcs-server, Azurite", "clouds"),
    Allowed("tests/repository/test_storage.py", "obstore, moto", "recipes"),
    Allowed("tests/server/models/test_storage.py", "obstore, moto", "recipes"),
    Allowed("tests/cli/test_serve_one.py::test_xgboost", "XGBoost", "recipes"),
    Allowed("tests/recipes/test_recipes.py::test_recipe[xgboost]", "XGBoost", "recipes"),
    Allowed("tests/recipes/test_recipes.py::test_recipe[fastapi]", "FastAPI", "recipes"),
    Allowed("tests/recipes/test_recipes.py::test_recipe[notebook]", "nbclient", "recipes"),
    Allowed("tests/recipes/test_recipes.py::test_recipe[clients]", "Node.js", "grpc-js"),
    Allowed("tests/test_site.py::test_the_site_builds", "mkdocs-material", "docs"),
    Allowed("tests/workers/remote/test_ray.py", "Ray", "ray"),
    Allowed("tests/net/grpc/test_interop_js.py::", "Node.js with grpc-js", "grpc-js"),
    Allowed("tests/server/observability/test_openapi_conformance.py::", "schemathesis", "openapi"),
    Allowed("tests/server/observability/test_console.py::", "Chromium", "chromium"),
    Allowed("tests/server/listeners/test_one_port.py::test_commands", "nghttp", "nghttp"),
    Allowed("tests/deploy/test_systemd.py::", "systemd", "systemd-analyze"),
    Allowed("tests/deploy/test_proxies.py::", "nginx", "nginx"),
    Allowed("tests/deploy/test_prometheus.py::test_promtool", "promtool, of Debian's prometheus"),
    Allowed("tests/deploy/test_chart.py::test_kubernetes", "schemas of Kubernetes", "kubernetes"),
    Allowed("tests/deploy/test_chart.py::", "helm", "helm"),
)
ELSEWHERE = "make test-extras"


class ListedSkips:
    """Turns skips that are not listed into failures, and counts the others."""

    def __init__(self, missing: dict[str, str] | None) -> None:
        self.missing = missing
        self.counts: Counter[str] = Counter()

    def reason(self, nodeid: str) -> str:
        """What the skipped test `nodeid` needs; "" if it should have run."""
        for allowed in ALLOWED:
            if not nodeid.startswith(allowed.tests):
                continue
            if not allowed.extra:
                return allowed.needs
            why = ELSEWHERE if self.missing is None else self.missing.get(allowed.extra, "")
            return f"{allowed.needs} ({why})" if why else ""
        return ""

    def judge(self, report: Any) -> None:
        if not report.skipped or hasattr(report, "wasxfail") or self.reason(report.nodeid):
            return
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, and tests/skips.py does not list it: {why}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self.judge(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        self.judge(report)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.counts[self.reason(report.nodeid)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.counts[self.reason(report.nodeid)] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for needs, count in sorted(self.counts.items()):
            terminalreporter.write_line(f"SKIPPED {count}: needs {needs}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extras", metavar="FILE", help="what tools/install_extras.py wrote")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--extras")
    missing = None if file is None else json.loads(Path(file).read_text())
    config.pluginmanager.register(ListedSkips(missing))
