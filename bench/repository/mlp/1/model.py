"""A small perceptron: float32 [784] -> 128 relu -> [10]."""

import numpy as np


class Model:
    """x: float32 [rows, 784] -> y: float32 [rows, 10]."""

    def __init__(self, config):
        rng = np.random.default_rng(42)
        self.hidden = rng.standard_normal((784, 128)).astype(np.float32) / np.float32(28)
        self.hidden_bias = rng.standard_normal(128).astype(np.float32)
        self.out = rng.standard_normal((128, 10)).astype(np.float32) / np.float32(11)
        self.out_bias = rng.standard_normal(10).astype(np.float32)

    def apply(self, x):
        hidden = x @ self.hidden + self.hidden_bias
        np.maximum(hidden, 0, out=hidden)
        return hidden @ self.out + self.out_bias

    def run(self, inputs):
        return {"y": self.apply(inputs["x"])}
