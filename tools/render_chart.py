"""Write deploy/kubernetes: the manifests of the Helm chart for those who apply files, by a real `helm`.

    python3 tools/render_chart.py HELM [FOLDER]      FOLDER: deploy/kubernetes, unless another is given

The first line of each has the chart's digest, so that a test without helm notices a chart that was changed.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/helm/fastserve"
FOLDER = ROOT / "deploy/kubernetes"
# File -> values that it is rendered with.
RENDERED = {
    "plain.yaml": (),
    "scaled.yaml": (
        "autoscaling.enabled=true",
        "headless=true",
        "models.existingClaim=models",
        "networkPolicy.monitoring[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring",
        "serviceMonitor.enabled=true",
    ),
    "keda.yaml": ("keda.enabled=true", "models.existingClaim=models", "env.FASTSERVE_FRONTENDS=2"),
    "workers.yaml": ("workers.secret=fastserve-workers", "replicas=1", "models.existingClaim=models"),
}


def digest() -> str:
    """Return a digest of the chart's files, their names and these values."""
    found = hashlib.sha256(repr(RENDERED).encode())
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(CHART)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def render(helm: str, values: tuple[str, ...]) -> str:
    """Return the chart's manifests."""
    flags = [
        part
        for value in values
        for part in (("--set-string" if value.startswith("env.") else "--set"), value)
    ]
    command = [helm, "template", "fastserve", str(CHART), "--namespace", "default", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def main(helm: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in RENDERED.items():
        head = f"# tools/render_chart.py made this of deploy/helm/fastserve, {digest()}\n"
        (folder / name).write_text(head + render(helm, values))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER)
