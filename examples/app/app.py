"""Models from a script: docs/app.md walks through it.

fastserve run examples/app/app.py
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import fastserve

Row = fastserve.Array[np.float32, 4]


@fastserve.model
def greet(name: str, times: int = 1) -> dict:
    return {"text": f"Hello {name}! " * times}


@fastserve.model(batch=64, max_queue_delay_us=500, instances=2)
def scale(x: Row) -> Row:
    return x * 3  # x: [rows, 4], rows of many callers


@dataclass
class Document:
    title: str
    words: list[str]


@fastserve.model(path="/v1/longest")
def longest(document: Document) -> dict:
    return {"title": document.title, "word": max(document.words, key=len, default="")}


@fastserve.model
class Classifier:
    def setup(self, device: str) -> None:
        self.weights = np.arange(8, dtype=np.float32).reshape(4, 2)

    def decode(self, numbers: list[float]) -> np.ndarray:
        return np.array(numbers, np.float32)

    def predict(self, row: np.ndarray) -> np.ndarray:
        return row @ self.weights

    def encode(self, scores: np.ndarray) -> dict:
        return {"class": int(scores.argmax()), "scores": scores}


@fastserve.model
def countdown(start: int) -> Iterator[dict]:
    for left in range(start, 0, -1):
        yield {"left": left}


if __name__ == "__main__":
    fastserve.serve()
