"""Its config.pbtxt names one input: the rest is said here."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        auto_complete_model_config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [1]})
        more = {"name": "MORE", "data_type": "TYPE_INT32", "dims": [1], "optional": True}
        auto_complete_model_config.add_input(more)
        auto_complete_model_config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [2]})
        auto_complete_model_config.set_max_batch_size(4)
        return auto_complete_model_config

    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, together):
        given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        more = pb_utils.get_input_tensor_by_name(request, "MORE")
        added = given if more is None else given + more.as_numpy()
        out = np.concatenate([added, np.full_like(given, together)], axis=1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])
