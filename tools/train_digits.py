"""Trains the demo model `digits` and writes it twice, with the held-out images beside the tests.

    pip install '.[demo]'
    python tools/train_digits.py

The demo that ships with the package gets the weights, which its model.py reads with numpy alone;
examples/onnx gets the same network as ONNX.

Plain numpy: a 64-128-10 perceptron, Adam, a third of the images shifted by a pixel, noise on all. Choices
come from one seed, so the same numpy gives the same file. Needs scikit-learn only for its data.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "fastserve/demo/digits/1/weights.npz"
MODEL = ROOT / "examples/onnx/digits/1/model.onnx"
HELD_OUT = ROOT / "tests/vectors/digits_test.json"
SEED, HIDDEN, EPOCHS, BATCH, RATE, DECAY = 7, 128, 120, 64, 2e-3, 1e-4
TEST_SHARE, MOVED, WANTED_ACCURACY = 0.2, 0.3, 0.97

Weights = dict[str, np.ndarray]


def main() -> None:
    rng = np.random.default_rng(SEED)
    data = load_digits()
    order = rng.permutation(len(data.target))
    test, train = np.split(order, [int(len(order) * TEST_SHARE)])
    images, digits = data.data.astype(np.float32), data.target.astype(np.int64)
    weights = fit(images[train], digits[train], rng)
    accuracy = float((scores(weights, images[test]).argmax(1) == digits[test]).mean())
    print(f"held-out accuracy {accuracy:.4f} on {len(test)} images")
    if accuracy < WANTED_ACCURACY:
        raise SystemExit(f"accuracy below {WANTED_ACCURACY}")
    # dividing by 16 once here saves a pass over every image later
    stored = {**weights, "w1": weights["w1"] / np.float32(16)}
    np.savez(WEIGHTS, **stored)
    onnx.save(export(stored), str(MODEL))
    held_out = {"images": images[test].astype(int).tolist(), "digits": digits[test].tolist()}
    HELD_OUT.write_text(json.dumps(held_out, separators=(",", ":")) + "\n")
    for written in (WEIGHTS, MODEL):
        print(f"{written.relative_to(ROOT)}: {written.stat().st_size} bytes")


def fit(images: np.ndarray, digits: np.ndarray, rng: np.random.Generator) -> Weights:
    """images: float32[n, 64] of 0..16; digits: int64[n]."""
    weights = {
        "w1": rng.normal(0, np.sqrt(2 / 64), (64, HIDDEN)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, 10)).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }
    mean = {name: np.zeros_like(w) for name, w in weights.items()}
    square = {name: np.zeros_like(w) for name, w in weights.items()}
    step = 0
    for epoch in range(EPOCHS):
        rate = RATE * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
        for chosen in np.array_split(rng.permutation(len(digits)), len(digits) // BATCH):
            step += 1
            slopes = gradient(weights, varied(images[chosen], rng), digits[chosen])
            for name, slope in slopes.items():
                mean[name] = 0.9 * mean[name] + 0.1 * slope
                square[name] = 0.999 * square[name] + 0.001 * slope * slope
                change = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
                weights[name] = (weights[name] - rate * (change + DECAY * weights[name])).astype(np.float32)
    return weights


def gradient(weights: Weights, images: np.ndarray, digits: np.ndarray) -> Weights:
    """Slopes of the mean cross entropy."""
    inputs = images / np.float32(16)
    hidden = np.maximum(inputs @ weights["w1"] + weights["b1"], 0)
    error = softmax(hidden @ weights["w2"] + weights["b2"])
    error[np.arange(len(digits)), digits] -= 1
    error /= len(digits)
    back = (error @ weights["w2"].T) * (hidden > 0)
    return {"w1": inputs.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


def varied(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The images with noise, some of them moved by up to one pixel each way (0.953 when all move)."""
    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    down, right = np.where(rng.random(len(images)) < MOVED, rng.integers(0, 3, (2, len(images))), 1)
    moved = [padded[i, d : d + 8, r : r + 8] for i, (d, r) in enumerate(zip(down, right, strict=True))]
    noise = rng.normal(0, 1, images.shape).astype(np.float32)
    return np.stack(moved).reshape(len(images), 64) + noise


def scores(weights: Weights, images: np.ndarray) -> np.ndarray:
    hidden = np.maximum(images / np.float32(16) @ weights["w1"] + weights["b1"], 0)
    return softmax(hidden @ weights["w2"] + weights["b2"])


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def export(weights: Weights) -> onnx.ModelProto:
    """image float32[rows, 64] -> scores float32[rows, 10], digit int64[rows]."""
    nodes = [
        helper.make_node("Gemm", ["image", "w1", "b1"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["digit"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 64])],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 10]),
            helper.make_tensor_value_info("digit", TensorProto.INT64, ["rows"]),
        ],
        [numpy_helper.from_array(w, name) for name, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], producer_name="fastserve")
    model.ir_version = 8  # old enough for every ONNX Runtime the package allows
    onnx.checker.check_model(model, full_check=True)
    return model


if __name__ == "__main__":
    main()
