"""A model that loves batches: it sleeps 0.001 * log(rows + 1) seconds, then squares."""

import math
import time


class Model:
    """x: float32 [rows, 1] -> y: float32 [rows, 1]."""

    def __init__(self, config):
        """Nothing to load."""

    def apply(self, x):
        time.sleep(0.001 * math.log(len(x) + 1))
        return x * x

    def run(self, inputs):
        return {"y": self.apply(inputs["x"])}
