"""A model that says when it says something: `20 0.2` is twenty messages, one each 0.2 s."""

import random
import time

from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.model_infer.inferer import ModelInferer, inferer_register


class Teller(ModelInferer):
    def load(self):
        return True

    def infer(self, inp, context):
        count, pause_s = inp.str_data.split()
        due = time.monotonic() + random.random() * float(pause_s)
        for number in range(int(count)):
            time.sleep(max(0.0, due - time.monotonic()))
            context.stream_respond(GrpsMessage(str_data=f"{number} {time.monotonic_ns()}"))
            due += float(pause_s)


inferer_register.register("teller", Teller())
