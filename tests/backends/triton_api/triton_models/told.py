"""A model that answers with the request's fields as JSON, and with the arguments of its own start."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = dict(args)
        self.args["model_config"] = json.loads(args["model_config"])["name"]
        del self.args["model_repository"]

    def execute(self, requests):
        return [self.tell(request) for request in requests]

    def tell(self, request):
        said = {
            "id": request.request_id(),
            "corr": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "priority": request.priority(),
            "params": json.loads(request.parameters()),
            "wanted": sorted(request.requested_output_names()),
            "model": [request.model_name(), request.model_version()],
            "cancelled": request.is_cancelled(),
            "inputs": [tensor.name() for tensor in request.inputs()],
        }
        outputs = [
            pb_utils.Tensor("OUT", np.array([json.dumps(said)], dtype=object)),
            pb_utils.Tensor("ARGS", np.array([json.dumps(self.args).encode()], dtype=np.object_)),
        ]
        return pb_utils.InferenceResponse(outputs, parameters={"n": 1, "s": "x", "b": True})
