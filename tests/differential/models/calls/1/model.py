"""Calls another model, which one the first number says, and passes on what comes."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        how, rest = int(array[0]), [pb_utils.Tensor("IN", array[1:])]
        if how == 0:
            return self.one("coroutine", ["OUT"], rest)
        if how == 1:
            return self.one("nowhere", ["OUT"], rest)
        if how == 2:
            return self.one("coroutine", ["OTHER"], rest)
        if how == 3:
            return self.one("fails", ["OUT"], [pb_utils.Tensor("IN", np.array([[b"deep"]], dtype=object))])
        if how == 4:
            return self.one("fails", ["OUT"], [pb_utils.Tensor("IN", np.array([[b"error"]], dtype=object))])
        if how == 6:
            return self.one("coroutine", ["OUT"], rest, model_version=7)
        call = self.request("repeat", ["OUT"], rest)
        found = []
        for response in call.exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            found += [tensor.as_numpy() for tensor in response.output_tensors()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.concatenate(found))])

    def request(self, model, outputs, inputs, **more):
        return pb_utils.InferenceRequest(
            model_name=model, requested_output_names=outputs, inputs=inputs, **more
        )

    def one(self, model, outputs, inputs, **more):
        response = self.request(model, outputs, inputs, **more).exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        out = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
        out += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
