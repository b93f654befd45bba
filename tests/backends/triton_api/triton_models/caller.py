"""Calls the model that its parameter `to` names, and passes on what it says."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.pass_on(request) for request in requests]

    def pass_on(self, request):
        said = json.loads(request.parameters())
        call = pb_utils.InferenceRequest(
            model_name=said["to"],
            requested_output_names=["OUT"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
            timeout=said.get("timeout", 0),
            parameters={"to": "caller", "timeout": said.get("timeout", 0)},
        )
        if not said.get("many"):
            response = call.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            out = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
        found = []
        for response in call.exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            found.append(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy())
            if len(found) == said.get("stop"):
                break
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.concatenate(found))])
