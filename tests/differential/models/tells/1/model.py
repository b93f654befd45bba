"""A model that answers with the request's fields as JSON."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = {name: value for name, value in args.items() if name != "model_repository"}
        config = json.loads(self.args.pop("model_config"))
        self.dims = config["input"][0]["dims"]

    def execute(self, requests):
        return [self.tell(request) for request in requests]

    def tell(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IN")
        said = {
            "id": request.request_id(),
            "correlation": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "wanted": [*request.requested_output_names()],
            "cancelled": request.is_cancelled(),
            "inputs": [tensor.name() for tensor in request.inputs()],
            "shape": list(given.shape()),
            "cpu": given.is_cpu(),
            "args": self.args,
            "dims": self.dims,
            "none": pb_utils.get_input_tensor_by_name(request, "NONE") is None,
        }
        out = np.array([json.dumps(said, sort_keys=True).encode()], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
