"""Goes wrong in the way its first word says."""

import numpy as np
import triton_python_backend_utils as pb_utils


def fall():
    raise ValueError("kaboom")


class TritonPythonModel:
    def execute(self, requests):
        words = [
            pb_utils.get_input_tensor_by_name(r, "IN").as_numpy().flatten()[0].decode() for r in requests
        ]
        return getattr(self, words[0])(requests)

    def fine(self, requests):
        return [self.say(request, "fine") for request in requests]

    def say(self, request, text):
        shape = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().shape
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(shape, text, dtype=object))])

    def deep(self, requests):
        fall()

    def lines(self, requests):
        raise RuntimeError("two\nlines")

    def chained(self, requests):
        try:
            fall()
        except ValueError as error:
            raise KeyError("other") from error

    def own(self, requests):
        raise pb_utils.TritonModelException("of its own")

    def error(self, requests):
        code = pb_utils.TritonError.NOT_FOUND
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("an error", code)) for _ in requests]

    def cancelled(self, requests):
        code = pb_utils.TritonError.CANCELLED
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("given up", code)) for _ in requests]

    def invalid(self, requests):
        code = pb_utils.TritonError.INVALID_ARG
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("bad input", code)) for _ in requests]

    def few(self, requests):
        return []

    def words(self, requests):
        return ["word" for _ in requests]

    def no_list(self, requests):
        return 5

    def wrong_type(self, requests):
        array = np.zeros((1, 1), np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for _ in requests]

    def unknown_output(self, requests):
        array = np.zeros((1, 1), np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", array)]) for _ in requests]

    def nothing(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def complex(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(2, complex))]) for _ in requests]

    def sender(self, requests):
        for request in requests:
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(self.say(request, "sent"), flags=final)
        return [None for _ in requests]
