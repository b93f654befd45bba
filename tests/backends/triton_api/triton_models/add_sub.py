"""Two int32 rows in, their sum and difference out; only what was asked for."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("A", "B"))
            made = {"SUM": a + b, "DIFF": a - b}
            wanted = request.requested_output_names()
            outputs = [pb_utils.Tensor(name, made[name]) for name in made if name in wanted]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
