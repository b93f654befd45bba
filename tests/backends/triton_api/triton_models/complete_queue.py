"""Says how it is queued only when it is asked to complete its configuration."""

import numpy as np
import triton_python_backend_utils as pb_utils

SIDE = {"data_type": "TYPE_INT32", "dims": [1]}


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        how = config.as_dict()["parameters"]["how"]["string_value"]
        config.add_input({"name": "IN", **SIDE})
        config.add_output({"name": "OUT", **SIDE})
        config.set_max_batch_size(4 if how == "batches" else 0)
        config.set_dynamic_batching()
        if how == "decoupled":
            config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        senders = [request.get_response_sender() for request in requests]
        for request, sender in zip(requests, senders, strict=True):
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for number in value.ravel() if value.ndim == 1 else [len(requests)]:
                out = np.full(value.shape, number, np.int32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
                if value.ndim == 1:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out + 1)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return [None for _ in requests] if value.ndim == 2 else None
