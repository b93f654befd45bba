"""Logs what it is given, at every level."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        logger = pb_utils.Logger
        for request in requests:
            for text in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                logger.log(text.decode())
                logger.log(text.decode(), logger.LogLevel.WARNING)
                for log in (logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose):
                    log(text.decode())
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
