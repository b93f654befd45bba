"""A running sum for each sequence."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        number, start, who = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0]
            for name in ("IN", "START", "CORRID")
        )
        if start:
            self.sums[who] = 0
        self.sums[who] += number
        out = np.array([[self.sums[who]]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
