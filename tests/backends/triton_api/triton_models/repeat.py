"""Decoupled: one response for each number of IN; -1 is an error, -2 raises, -3 waits until the caller left,
-4 dies, -5 goes on in a thread, -6 sends a thousand, -7 a hundred of a
megabyte."""

import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().tolist()
            sender = request.get_response_sender()
            if -5 in numbers:
                threading.Thread(target=self.send, args=(request, sender, numbers)).start()
            else:
                self.send(request, sender, numbers)

    def send(self, request, sender, numbers):
        for number in numbers:
            if number >= 0:
                sender.send(self.response(number))
            elif number == -1:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("a bad value")))
            elif number == -2:
                raise ValueError("kaboom")
            elif number == -3:
                while not request.is_cancelled():
                    time.sleep(0.001)
            elif number == -4:
                os._exit(7)
            elif number == -6:
                for i in range(1000):
                    sender.send(self.response(i))
            elif number == -7:
                for _ in range(100):
                    sender.send(self.response(*[7] * (1 << 18)))
        sender.send(flags=FINAL)

    def response(self, *numbers):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(numbers, np.int32))])
