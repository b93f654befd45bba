"""Decoupled, from a thread: IN responses, each IN; -1 raises, -2 answers with a list."""

import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.running = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            given = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if given == -1:
                raise ValueError("kaboom")
            with self.lock:
                self.running += 1
            threading.Thread(target=self.send, args=(request, request.get_response_sender())).start()

    def send(self, request, sender):
        array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        for _ in range(int(array[0])):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.running -= 1
