"""Folders as they are found on disk: odd names, links, label files, faults that are explained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastserve.backends.registry import BackendEntry
from fastserve.repository.layout import Layout, is_model_name
from fastserve.settings import ModelEntry, PolicyChoice, RepositorySettings
from tests.repository.folders import write_config, write_version


def layout(root: Path) -> Layout:
    return Layout(RepositorySettings(repository=str(root)))


@pytest.mark.parametrize("name", ["m", "a.b-c_D9", "x" * 128, "..a", "1"])
def test_names_that_may_be(name: str) -> None:
    assert is_model_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "...", "a/b", "a b", "x" * 129, "é", "a\n", "a\0", "m?x=1"])
def test_names_that_may_not_be(name: str) -> None:
    assert not is_model_name(name)


def test_what_is_a_model_and_what_is_passed_over(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    for number in ("1", "007", "7", "v2", "tmp", "9223372036854775808"):
        write_version(tmp_path, "m", number)
    (tmp_path / "m" / "3").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / ".git" / "1").mkdir(parents=True)
    (tmp_path / "a b" / "1").mkdir(parents=True)
    (tmp_path / "bare" / "1").mkdir(parents=True)
    (tmp_path / "auto" / "1").mkdir(parents=True)
    (tmp_path / "auto" / "1" / "model.onnx").write_bytes(b"x")
    (tmp_path / "README").write_text("")
    found = layout(tmp_path).scan()
    assert sorted(found) == ["a b", "auto", "bare", "m"]
    assert sorted(found["m"].versions) == [1, 7]
    assert found["m"].versions[7].folder.name == "7"  # of 007 and 7 the lexically later
    assert found["m"].notes == ["version 3: no model.py"]
    assert found["a b"].error.startswith('name: given "a b", allowed: text matching')
    assert found["bare"].error == (
        "no model.yaml, and no version folder holds a model.onnx or saved_model.pb or model.skops or "
        "model.json or model.txt or model.cbm or model.tl or config.json"
    )
    assert found["auto"].config is not None
    assert found["auto"].config.backend == "onnx"


def test_a_folder_with_weights_is_a_text_model(tmp_path: Path) -> None:
    for name, files in {"llm": ("config.json", "model.safetensors"), "bare": ("config.json",)}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        for file in files:
            (tmp_path / name / "1" / file).write_text("{}")
    found = layout(tmp_path).scan()
    config = found["llm"].config
    assert config is not None
    assert (config.backend, config.max_batch_size, config.options.decoupled) == ("text", 0, True)
    assert config.text is not None
    assert "no version folder holds" in found["bare"].error
    before = found["llm"].versions[1].stamp
    (tmp_path / "llm" / "1" / "model.safetensors").write_text("other weights")
    assert layout(tmp_path).scan()["llm"].versions[1].stamp != before


def test_links_stay_inside_the_repository(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_config(outside, "m")
    write_version(outside, "m", 1)
    write_config(root, "m")
    write_version(root, "m", 1)
    os.symlink(outside / "m", root / "whole")
    os.symlink(outside / "m" / "1", root / "m" / "2")
    (root / "m" / "3").mkdir()
    os.symlink(outside / "m" / "1" / "model.py", root / "m" / "3" / "model.py")
    os.symlink(root / "m" / "1", root / "m" / "4")
    os.symlink(root / "m", root / "other_name")
    os.symlink(root / "m" / "5", root / "m" / "5")
    write_version(root, "linked_config", 1)
    os.symlink(outside / "m" / "model.yaml", root / "linked_config" / "model.yaml")
    found = layout(root).scan()
    assert found["whole"].error == "the folder is a link that leads out of the repository"
    assert found["linked_config"].error == "model.yaml is a link that leads out of the repository"
    assert sorted(found["m"].versions) == sorted(found["other_name"].versions) == [1, 4]
    assert found["m"].notes == [
        "version 2: a link leads out of the repository",
        "version 3: a link leads out of the repository",
    ]
    assert layout(root).scan_one("../outside/m") is None


def test_class_labels_from_a_file(tmp_path: Path) -> None:
    write_config(tmp_path, "m", class_labels="labels.txt")
    write_version(tmp_path, "m", 1)
    place = layout(tmp_path)
    assert place.scan()["m"].error == (
        "model.yaml: class_labels 'labels.txt': cannot be read: No such file or directory"
    )
    (tmp_path / "m" / "labels.txt").write_text("cat\ndog\n")
    config = place.scan()["m"].config
    assert config is not None
    assert config.class_texts == ("cat", "dog")
    (tmp_path / "m" / "labels.txt").write_text("cat\ndog\nfox\n")
    config = place.scan()["m"].config
    assert config is not None
    assert config.class_texts == ("cat", "dog", "fox")
    (tmp_path / "m" / "out").symlink_to("/etc/passwd")
    for name in ("../../etc/passwd", "/etc/passwd", "out"):
        write_config(tmp_path, "m", class_labels=name)
        assert place.scan()["m"].error.endswith("leads out of its folder")


def test_a_config_is_parsed_again_only_when_it_changed(tmp_path: Path) -> None:
    write_config(tmp_path, "m")
    write_version(tmp_path, "m", 1)
    place = layout(tmp_path)
    first = place.scan()["m"].config
    assert place.scan()["m"].config is first
    write_config(tmp_path, "m", instances=2)
    second = place.scan()["m"].config
    assert second is not None
    assert second.instances == 2


def test_models_named_outright(tmp_path: Path) -> None:
    write_config(tmp_path / "root", "a")
    write_version(tmp_path / "root", "a", 1)
    write_config(tmp_path, "elsewhere", labels={"x": 1})
    write_version(tmp_path, "elsewhere", 4)
    entries = (
        ModelEntry(
            name="a",
            base_path=str(tmp_path / "elsewhere"),
            version_policy=PolicyChoice(specific=[4]),
            labels={"y": 4},
        ),
        ModelEntry(name="b", base_path=str(tmp_path / "nowhere")),
        ModelEntry(name="c", base_path=str(tmp_path / "root")),
    )
    found = Layout(RepositorySettings(repository=str(tmp_path / "root"), models=entries)).scan()
    assert found["a"].config is not None
    assert found["a"].config.labels == {"y": 4}
    assert sorted(found["a"].versions) == [4]
    assert found["a"].notes == ["also in the repository folder, which `models` overrides"]
    assert found["b"].error == "base_path is not a folder"
    assert found["c"].error == "no version folder in base_path"


def test_a_text_model_as_it_is_downloaded(tmp_path: Path) -> None:
    """Named outright, its folder needs no other around it."""
    folder = tmp_path / "Qwen2-0.5B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    entry = ModelEntry(name="llm", base_path=str(folder))
    settings = RepositorySettings(models=(entry,), model_defaults={"text": {"max_new_tokens": 7}})
    assert Layout(settings).scan()["llm"].absent
    (folder / "model.safetensors").touch()
    found = Layout(settings).scan()["llm"]
    assert found.config is not None
    assert (found.config.backend, found.error, list(found.versions)) == ("text", "", [1])
    assert found.versions[1].folder == folder
    assert Layout(RepositorySettings(repository=str(tmp_path))).scan() == {}


def test_a_client_names_folders_of_saved_models_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`saved_model` of an entry: what could run other code is refused, also once it comes later."""
    monkeypatch.setattr(BackendEntry, "installed", True)  # whether TensorFlow is here or not
    base = tmp_path / "m"
    (base / "1").mkdir(parents=True)
    graph = base / "1" / "saved_model.pb"
    graph.write_bytes(b"graph")
    seen = Layout(RepositorySettings(models=(ModelEntry("m", str(base), saved_model=True),)))
    assert seen.scan()["m"].error == ""
    tensors = (
        'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    held = {
        "model.yaml": "backend: tensorflow\nenv: {LD_PRELOAD: /tmp/x.so}\n",
        "config.pbtxt": f'backend: "python" max_batch_size: 1 {tensors}',
        "1/model.onnx": "",
        "1/model.py": "class TritonPythonModel: pass",
    }
    for name, text in held.items():
        (base / name).write_text(text)
        if name == "1/model.py":
            graph.unlink()
        assert "clients name folders of SavedModels alone" in seen.scan()["m"].error, name
        (base / name).unlink()
