"""Asks the model `in_place` with its own input; answers with that input and what was said, which it writes
into."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        call = pb_utils.InferenceRequest(
            model_name="in_place", requested_output_names=["OUT"], inputs=[tensor]
        )
        found = pb_utils.get_output_tensor_by_name(call.exec(), "OUT").as_numpy()
        found += 1
        both = np.concatenate([tensor.as_numpy(), found], axis=-1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", both)])
