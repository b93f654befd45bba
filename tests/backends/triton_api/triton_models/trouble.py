"""Goes wrong in the way its input says: a code of TritonError, or worse."""

import os
import signal
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS")


class TritonPythonModel:
    kept = []

    def execute(self, requests):
        words = [
            pb_utils.get_input_tensor_by_name(r, "IN").as_numpy().flatten()[0].decode() for r in requests
        ]
        special = {word for word in words if word.startswith("!")}
        if special:
            return getattr(self, special.pop()[1:])(requests)
        return [self.answer(word) for word in words]

    def answer(self, word):
        if word == "SURROGATE":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("the model says \ud800"))
        if word == "HUGE":
            return pb_utils.InferenceResponse(parameters={"n": 1 << 70})
        if word in CODES:
            code = getattr(pb_utils.TritonError, word)
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"the model says {word}", code))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([word], dtype=object))])

    def raises(self, requests):
        raise ValueError("kaboom")

    def exits(self, requests):
        os._exit(3)

    def reschedules(self, requests):
        for request in requests:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def measures(self, requests):
        pb_utils.MetricFamily(name="nv_inference_count", description="", kind=pb_utils.MetricFamily.COUNTER)

    def leaves(self, requests):
        sys.exit("enough")

    def segfaults(self, requests):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(self, requests):
        threading.Event().wait()

    def none(self, requests):
        return None

    def few(self, requests):
        return []

    def strange(self, requests):
        return ["no response" for _ in requests]

    def misnamed(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(2, complex))]) for _ in requests]

    def twice(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self.answer("first"))
            sender.send(self.answer("second"))

    def later(self, requests):
        """Answers from another thread, after execute has returned."""

        def work(senders):
            for sender in senders:
                sender.send(self.answer("late"), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        senders = [request.get_response_sender() for request in requests]
        threading.Thread(target=work, args=(senders,)).start()
        return [None for _ in requests]

    def forgets(self, requests):
        for request in requests:
            request.get_response_sender()
        return [None for _ in requests]
