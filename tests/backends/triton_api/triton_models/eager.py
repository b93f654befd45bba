"""Answers large numbers at once, fails the whole list for one below zero, and counts how often it is run.
Answers are the number, the runs so far, and how many of those had a large one."""

import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

LARGE, SLOW = 100, 1000


class TritonPythonModel:
    def initialize(self, args):
        self.runs = self.runs_of_large = 0

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        numbers = [int(array[0, 0]) for array in arrays]
        self.runs += 1
        self.runs_of_large += any(LARGE <= number < SLOW for number in numbers)
        if SLOW in numbers:
            until = time.monotonic() + 60  # others gather meanwhile
            while not Path(__file__).with_name("go").exists() and time.monotonic() < until:
                time.sleep(0.001)
        found = []
        for number, request in zip(numbers, requests, strict=True):
            if number >= LARGE:
                request.get_response_sender().send(
                    self.response(number), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                )
                found.append(None)
            else:
                found.append(self.response(number))
        if min(numbers) < 0:
            raise ValueError("a number below zero")
        return found

    def response(self, number):
        out = np.array([[number, self.runs, self.runs_of_large]], np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
