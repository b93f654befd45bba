"""Files that a client's config names: nothing outside the model's folder is read, for any field and API."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import Answer, Http, leaks, pair
from tests.running import Running

V1_HEADER = (
    'batch_size: 1 input { name: "INPUT0" } input { name: "INPUT1" } '
    'output { name: "OUTPUT0" cls { count: 16 } }'
)
CLASSES = [{"name": "OUTPUT0", "parameters": {"classification": 16}}]
PLACES = (
    "/etc/passwd", "/proc/self/environ", "/dev/zero", "../../../../../../etc/passwd", "../sums/model.yaml",
    "away", "zero", "pipe", "1/../../sums/model.yaml",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    """The folder of `simple`, with what a name in it might lead to."""
    made = models / "simple"
    (made / "away").symlink_to("/etc/passwd")
    (made / "zero").symlink_to("/dev/zero")
    os.mkfifo(made / "pipe")
    (made / "initial_state").mkdir()
    (made / "initial_state" / "away").symlink_to("/etc/passwd")
    (made / "initial_state" / "zero").symlink_to("/dev/zero")
    os.mkfifo(made / "initial_state" / "pipe")
    return made


@pytest.fixture
def config(served: Running, http: Http, folder: Path) -> Iterator[dict[str, Any]]:
    """The config of `simple`, which is loaded from its folder again in the end."""
    yield http.ask("GET", "/v2/models/simple/config").json()
    assert http.post("/v2/repository/models/simple/load", {}).status == 200


def load(http: Http, config: dict[str, Any]) -> Answer:
    return http.post("/v2/repository/models/simple/load", {"parameters": {"config": json.dumps(config)}})


def classes_of_v1(http: Http) -> bytes:
    data = struct.pack("<32i", *range(32))
    answer = http.ask("POST", "/api/infer/simple", data, NV_InferRequest=V1_HEADER)
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize("place", PLACES)
def test_label_files(served: Running, http: Http, config: dict[str, Any], tmp_path: Path, place: str) -> None:
    config["output"][0]["label_filename"] = place
    answer = load(http, config)
    assert answer.status in (400, 500), answer
    assert not leaks(served, answer, place)
    assert b'label: "label3"' in classes_of_v1(http)
    answer = http.post("/v2/models/simple/infer", pair(outputs=CLASSES))
    assert "label3" in answer.body.decode()


@pytest.mark.logs_errors
@pytest.mark.parametrize("place", [*PLACES, "..", "."])
def test_files_of_states_and_models(served: Running, http: Http, config: dict[str, Any], place: str) -> None:
    state = {
        "input_name": "IN", "output_name": "OUT", "data_type": "TYPE_INT32", "dims": [4],
        "initial_state": [{"name": "s", "data_type": "TYPE_INT32", "dims": [4], "data_file": place}],
    }  # fmt: skip
    control = {"name": "START", "control": [{"int32_false_true": [0, 1]}]}
    sequence = {"direct": {}, "control_input": [control], "state": [state]}
    plain = {key: value for key, value in config.items() if key != "dynamic_batching"}
    for change in ({"sequence_batching": sequence}, {"default_model_filename": place}):
        answer = load(http, {**plain, **change})
        assert answer.status in (400, 500), (change, answer)
        assert not leaks(served, answer, place), change
        assert "root:" not in answer.error


@pytest.mark.parametrize("place", [place for place in PLACES if "/" in place])
def test_files_of_warm_ups(served: Running, http: Http, config: dict[str, Any], place: str) -> None:
    """Warm-up files are names in the folder `warmup`; those that lead out of it:
    tests/workers/test_warmup.py."""
    sample = {"data_type": "TYPE_INT32", "dims": [16], "input_data_file": place}
    inputs = {"INPUT0": sample, "INPUT1": sample}
    answer = load(http, {**config, "model_warmup": [{"name": "w", "batch_size": 1, "inputs": inputs}]})
    assert answer.status in (400, 500), answer
    assert not leaks(served, answer, place)


def test_a_label_file_in_the_models_folder_is_read(http: Http, config: dict[str, Any], folder: Path) -> None:
    (folder / "more").mkdir(exist_ok=True)
    (folder / "more" / "animals.txt").write_text("cat\r\ndog\n\nfox\n")
    config["output"][0]["label_filename"] = "more/animals.txt"
    assert load(http, config).status == 200
    assert http.post("/v2/models/simple/infer", pair(outputs=CLASSES)).status == 200
    assert classes_of_v1(http).count(b"label:") == 3
