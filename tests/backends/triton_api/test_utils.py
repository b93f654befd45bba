"""triton_python_backend_utils has the names, values and orders of the real one (facts of 2.51)."""

from __future__ import annotations

import numpy as np
import pytest

from fastserve.backends.triton_api import utils as pb_utils


def test_types_and_their_numbers():
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_BOOL"] is bool
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert [pb_utils.triton_to_numpy_type(n) for n in (1, 11, 13, 14)] == [
        np.bool_,
        np.float32,
        np.object_,
        None,
    ]
    given = (np.bool_, np.float32, np.bytes_, np.object_)
    assert [pb_utils.numpy_to_triton_type(t) for t in given] == [1, 11, 13, 13]
    assert (int(pb_utils.TRITONSERVER_MEMORY_GPU), int(pb_utils.TRITONSERVER_MEMORY_CPU)) == (0, 1)
    assert int(pb_utils.Logger.LogLevel.VERBOSE) == 3
    assert pb_utils.Logger.INFO is pb_utils.Logger.LogLevel.INFO


def test_strings_as_bytes():
    strings = np.array([b"ab", "c", 5], dtype=object)
    packed = b"\x02\0\0\0ab\x01\0\0\0c\x01\0\0\x005"
    assert pb_utils.serialize_byte_tensor(strings) == packed
    assert pb_utils.serialize_byte_tensor(np.array([])) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None
    assert pb_utils.deserialize_bytes_tensor(packed).tolist() == [b"ab", b"c", b"5"]


def test_a_request_by_position():
    tensor = pb_utils.Tensor("IN", np.zeros(1))
    made = pb_utils.InferenceRequest("id", 5, [tensor], ["OUT", "MORE"], "other", 1, 3, 9)
    assert (made.request_id(), made.correlation_id(), made.inputs()) == ("id", 5, [tensor])
    assert (made.model_name(), made.model_version(), made.flags(), made.timeout()) == ("other", 1, 3, 9)
    assert made.requested_output_names() == {"OUT", "MORE"}
    with pytest.raises(TypeError):
        pb_utils.InferenceRequest("other", ["OUT"], [tensor])
    with pytest.raises(TypeError):
        pb_utils.PreferredMemory()


def config(**fields):
    return pb_utils.ModelConfig({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields})


def test_what_auto_complete_config_may_not_say():
    entry = {"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}
    said = config(max_batch_size=8, input=[dict(entry)], sequence_batching={"direct": {}})
    for wrong in (
        lambda: said.set_max_batch_size(4),
        said.set_dynamic_batching,
        lambda: said.add_input({**entry, "dims": [5]}),
        lambda: said.add_input({**entry, "data_type": "TYPE_INT8"}),
        lambda: said.add_input({**entry, "shape": [4]}),
        lambda: said.add_input({"name": "IN", "dims": [4]}),
        lambda: said.add_output({**entry, "optional": True}),
        lambda: said.set_model_transaction_policy({"coupled": True}),
    ):
        with pytest.raises(ValueError, match="auto_complete_config of model 'm'"):
            wrong()
    said.set_max_batch_size(16)
    said.add_input({**entry, "dims": (4,), "optional": True})
    assert said.as_dict()["input"] == [{**entry, "optional": True}]
    assert said.as_dict()["max_batch_size"] == 16
