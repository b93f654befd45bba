"""Decoupled: a response for each number of IN; -1 is an error."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                sender.send(self.response(number))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, number):
        if number == -1:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("a bad number"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))])
