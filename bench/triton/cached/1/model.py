"""Sum and difference of two int32 [rows, 16], one request at a time: a model of Triton's Python backend."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        made = {"OUTPUT0": a + b, "OUTPUT1": a - b}
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, made[n]) for n in made if n in wanted])
