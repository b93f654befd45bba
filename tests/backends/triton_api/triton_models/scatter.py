"""Decoupled: one response for each number of IN, then the end, sent in the way the first number says.

1 a coroutine, 2 a thread that was handed the list, 3 forgets the end, 4 says nothing at all, 5 a thread that
raises, 6 a coroutine that raises, 7 a coroutine that exits, 8 a coroutine cancelled, 9 a task of its own,
10 nothing but the end
"""

import asyncio
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.tasks = set()

    def execute(self, requests):
        how = int(pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0])
        if how in (1, 6, 7, 8, 9):
            return self.later(requests, how)
        if how in (2, 5):
            threading.Thread(target=self.from_list, args=(requests, how)).start()
        elif how == 3:
            for request in requests:
                self.send(request, end=False)
        elif how == 10:
            for request in requests:
                request.get_response_sender().send(flags=FINAL)
        return None

    async def later(self, requests, how):
        await asyncio.sleep(0.01)  # execute's caller has returned by now
        if how == 9:
            task = asyncio.get_running_loop().create_task(self.later(requests, 1))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            return
        for request in requests:
            sender = self.send(request, end=False)
            if how == 6:
                raise ValueError("kaboom")
            if how == 7:
                sys.exit("enough")
            if how == 8:
                asyncio.current_task().cancel()
            await asyncio.sleep(0)
            sender.send(flags=FINAL)

    def from_list(self, requests, how):
        for request in requests:
            sender = self.send(request, end=False)
            if how == 5:
                raise ValueError("kaboom")
            sender.send(flags=FINAL)

    def send(self, request, end):
        sender = request.get_response_sender()
        for number in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
            out = pb_utils.Tensor("OUT", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([out]))
        return sender
