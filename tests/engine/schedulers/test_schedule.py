"""The log of a version's schedule when it opens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fastserve.engine.schedulers.schedule import Schedule
from fastserve.repository.triton_config.reading import parse_triton_text, to_model_config
from fastserve.repository.version import Version

CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" dims: [ 1 ] data_type: TYPE_FP32 } output { name: "y" dims: [ 1 ] data_type: TYPE_FP32 }
"""
IDLE = """
cc_model_filenames { key: "7.0" value: "v.py" }
optimization { priority: PRIORITY_MAX cuda { graphs: true } }
instance_group [ { count: 1 host_policy: "near" }, { count: 2 passive: true } ]
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_INT32 source_input: "x" }
"""


def version_of(text: str) -> Version:
    return Version("m", 1, Path(), to_model_config(parse_triton_text(CONFIG + text, "m")))


def test_fields_without_effect_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    version = version_of(IDLE)
    assert (version.config.fault, version.config.instances) == ("", 1)
    Schedule(version)
    named = [record.getMessage().split(">: ")[1].split(" has ")[0] for record in caplog.records]
    assert named == [
        "cc_model_filenames",
        "instance_group[0].host_policy",
        "instance_group[1], being passive,",
        "optimization.priority",
        "optimization.cuda",
        "batch_input",
    ]


def test_a_config_that_all_takes_effect_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    Schedule(version_of("instance_group { count: 2 }"))
    assert caplog.records == []


def test_passive_workers_alone_are_none() -> None:
    text = "instance_group { count: 2 passive: true }"
    assert "instance_group.passive: given true" in version_of(text).config.fault
