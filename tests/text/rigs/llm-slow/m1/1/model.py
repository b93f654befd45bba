"""Two words and an end of sequence, with a long pause before each; one request at a time."""

import time


class Model:
    info = {"eos_ids": [2]}

    def __init__(self, config):
        self.pause_s = config["parameters"]["pause_s"]

    def generate(self, request):
        for token in ((100, "Hello"), (101, " world"), (2, "")):
            due = time.monotonic() + self.pause_s
            while time.monotonic() < due:
                time.sleep(0.001)
                yield None
            yield token
