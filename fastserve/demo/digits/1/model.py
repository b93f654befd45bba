"""Which digit a picture shows: a perceptron of two layers, in numpy alone."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np


class Model:
    """image: float32 [rows, 64] -> scores: float32 [rows, 10], digit: int64 [rows]."""

    def __init__(self, config: Mapping[str, str]) -> None:
        with np.load(Path(config["version_dir"]) / "weights.npz") as weights:
            self.w1, self.b1, self.w2, self.b2 = (weights[name] for name in ("w1", "b1", "w2", "b2"))

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        hidden = np.maximum(inputs["image"] @ self.w1 + self.b1, 0)
        logits = hidden @ self.w2 + self.b2
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        return {"scores": raised / raised.sum(axis=1, keepdims=True), "digit": logits.argmax(axis=1)}
