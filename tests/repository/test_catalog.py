"""Names of classes: an output's own file, or those of the model that writes an ensemble's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastserve.repository.catalog import Catalog, labels_of
from fastserve.repository.layout import Layout
from fastserve.repository.version import Version, VersionState
from fastserve.settings import RepositorySettings

TENSORS = """max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] %s } ]
"""
STEP = """{ model_name: "%s" model_version: -1
  input_map { key: "IN" value: "%s" } output_map { key: "OUT" value: "%s" } }"""


def write(root: Path, name: str, config: str, **files: str) -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "1" / "model.py").write_text("class TritonPythonModel: pass\n")
    (root / name / "config.pbtxt").write_text(config)
    for file, text in files.items():
        (root / name / file).write_text(text)


def catalog_of(root: Path) -> Catalog:
    """Every model of a folder, as if it had been loaded."""
    catalog = Catalog()
    for name, folder in Layout(RepositorySettings(repository=str(root))).scan().items():
        assert folder.config is not None, folder.error
        version = Version(name, 1, folder.folder / "1", folder.config)
        catalog.put(version)
        catalog.move(version, VersionState.LOADING)
        catalog.move(version, VersionState.AVAILABLE)
    return catalog


def ensemble(*steps: str, own: str = "") -> str:
    return 'platform: "ensemble" ' + TENSORS % own + f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"


def test_an_ensemble_has_the_labels_of_the_model_that_writes_the_output(tmp_path: Path) -> None:
    labelled = 'backend: "python" ' + TENSORS % 'label_filename: "words"'
    write(tmp_path, "last", labelled, words="a\nb\n\nd e\n")
    write(tmp_path, "first", labelled, words="wrong\n")
    write(tmp_path, "bare", 'backend: "python" ' + TENSORS % "")
    write(tmp_path, "two", ensemble(STEP % ("first", "IN", "mid"), STEP % ("last", "mid", "OUT")))
    write(tmp_path, "outer", ensemble(STEP % ("bare", "IN", "mid"), STEP % ("two", "mid", "OUT")))
    write(tmp_path, "own", ensemble(STEP % ("last", "IN", "OUT"), own='label_filename: "x"'), x="x\r\ny")
    write(tmp_path, "none", ensemble(STEP % ("bare", "IN", "OUT")))
    catalog = catalog_of(tmp_path)

    def found(name: str) -> list[str]:
        version: Any = catalog.available(name)
        return list(labels_of(version, "OUT", catalog))

    assert found("last") == found("two") == found("outer") == ["a", "b", "", "d e"]
    assert (found("own"), found("bare"), found("none")) == (["x", "y"], [], [])


def test_a_label_file_that_changed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, "m", 'backend: "python" ' + TENSORS % 'label_filename: "words"', words="a\n")
    layout = Layout(RepositorySettings(repository=str(tmp_path)))
    first = layout.scan()["m"].config
    assert layout.scan()["m"].config is first
    (tmp_path / "m" / "words").write_text("a\nb\n")
    second = layout.scan()["m"].config
    assert second is not None
    assert second.output_labels == {"OUT": ["a", "b"]}
    (tmp_path / "m" / "words").unlink()
    assert layout.scan()["m"].error == (
        "output OUT: label_filename 'words': cannot be read: No such file or directory"
    )
