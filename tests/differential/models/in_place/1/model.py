"""Pictures as 0 to 1, where they lie."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            picture = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            picture /= 255
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", picture)]))
        return responses
