"""Fails a whole list for one bad number, after it has written into what it was given."""

import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        for array in arrays:
            array *= 2
        if any((array == 2000).any() for array in arrays):
            until = time.monotonic() + 60  # others gather meanwhile
            while not Path(__file__).with_name("go").exists() and time.monotonic() < until:
                time.sleep(0.001)
        if any((array < 0).any() for array in arrays):
            raise ValueError("a number below zero")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
