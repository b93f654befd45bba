"""An image's worth of numbers and next to no work: the mean of each eighth of 150528 floats."""

import numpy as np


class Model:
    """x: float32 [rows, 150528] -> y: float32 [rows, 8]."""

    def __init__(self, config):
        """Nothing to load."""

    def apply(self, x):
        return x.reshape(len(x), 8, -1).mean(axis=2, dtype=np.float32)

    def run(self, inputs):
        return {"y": self.apply(inputs["x"])}
