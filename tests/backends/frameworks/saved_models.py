"""Writes the SavedModels of test_tensorflow.py: `python saved_models.py FOLDER`, in a process of its own,
since TensorFlow's threads never end. Also what TensorFlow itself answers: FOLDER/expected.npz."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf

X = np.array([1.0, 2.0, 5.0, -7.25], np.float32)
WORDS = np.array([[b"a", b"bcd"], [b"\xff\x00", b""]], object)
IMAGE = np.random.default_rng(4).standard_normal((3, 4, 2)).astype(np.float32)
DTYPES = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("half", "bfloat16", "float32", "float64", "complex64")


def spec(dtype: tf.DType, *shape: int | None, name: str) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype, name=name)


class Half(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = tf.Variable(0.5), tf.Variable(2.0)

    @tf.function(input_signature=[spec(tf.float32, None, name="x")])
    def predict(self, x):
        return {"y": self.a * x + self.b}

    @tf.function(input_signature=[spec(tf.string, None, None, name="words")])
    def strings(self, words):
        return {"joined": tf.strings.reduce_join(words, axis=1), "length": tf.strings.length(words)}

    @tf.function(input_signature=[spec(tf.string, None, name="inputs")])
    def regress(self, inputs):
        parsed = tf.io.parse_example(inputs, {"x": tf.io.FixedLenFeature([1], tf.float32)})
        return {"outputs": self.a * parsed["x"] + self.b}

    @tf.function(input_signature=[spec(tf.float32, None, None, 2, name="b"), spec(tf.int64, None, name="a")])
    def several(self, b, a):
        return {"total": tf.reduce_sum(b, axis=1), "axes": a + 1, "same": b}

    @tf.function(input_signature=[spec(tf.float32, None, name="x")])
    def refuse(self, x):
        return {"y": tf.debugging.check_numerics(x, "not a number")}

    @tf.function(input_signature=[spec(tf.float32, name="x")])
    def scalar(self, x):
        return {"y": x}


class Types(tf.Module):
    @tf.function(input_signature=[spec(getattr(tf, name), None, name=name) for name in (*DTYPES, *FLOATS)])
    def predict(self, *given):
        return {f"{name}_out": tf.identity(one) for name, one in zip((*DTYPES, *FLOATS), given, strict=True)}


class Keeps(tf.Module):
    """Holds what came last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = tf.Variable(tf.zeros([1]), shape=[None])

    @tf.function(input_signature=[spec(tf.float32, None, name="x")])
    def predict(self, x):
        before = tf.identity(self.last)
        self.last.assign(x)
        return {"y": tf.reduce_sum(before) + x * 0}


def write_graph(folder: Path) -> None:
    """As TensorFlow 1 wrote them: signatures share tensors of one graph, and classify."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        serialized = v1.placeholder(tf.string, [None], name="tf_example")
        x = tf.identity(
            tf.io.parse_example(serialized, {"x": tf.io.FixedLenFeature([1], tf.float32)})["x"], "x"
        )
        weight = v1.get_variable("weight", initializer=0.5)
        y = tf.add(weight * x, 2.0, name="y")
        session.run(v1.global_variables_initializer())
        build, info = v1.saved_model.build_signature_def, v1.saved_model.build_tensor_info
        builder = v1.saved_model.Builder(str(folder))
        signatures = {
            "serving_default": build({"x": info(x)}, {"y": info(y)}, "tensorflow/serving/predict"),
            "classify": build(
                {"inputs": info(serialized)}, {"scores": info(y)}, "tensorflow/serving/classify"
            ),
            "regress": build(
                {"inputs": info(serialized)}, {"outputs": info(y)}, "tensorflow/serving/regress"
            ),
        }
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()


def write_keras(folder: Path) -> np.ndarray:
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3, activation="tanh")])
    model.export(str(folder), verbose=False)
    return model(IMAGE[:, :, 0]).numpy()


def main(root: Path) -> None:
    half = Half()
    signatures = {
        "serving_default": half.predict,
        "strings": half.strings,
        "regress": half.regress,
        "several": half.several,
        "refuse": half.refuse,
        "scalar": half.scalar,
    }
    tf.saved_model.save(half, root / "half/1", signatures=signatures)
    tf.saved_model.save(half, root / "plain/1", signatures={"serving_default": half.predict})
    tf.saved_model.save(half, root / "named/1", signatures={"a": half.predict, "b": half.several})
    tf.saved_model.save(half, root / "scalar/1", signatures={"serving_default": half.scalar})
    tf.saved_model.save(half, root / "without/1")
    types, keeps = Types(), Keeps()
    tf.saved_model.save(types, root / "types/1", signatures={"serving_default": types.predict})
    tf.saved_model.save(keeps, root / "keeps/1", signatures={"serving_default": keeps.predict})
    write_graph(root / "graph/1")
    keras = write_keras(root / "keras/1")
    shutil.copytree(root / "plain/1", root / "text/1")
    from google.protobuf import text_format
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    binary = root / "text/1/saved_model.pb"
    saved = SavedModel.FromString(binary.read_bytes())
    (root / "text/1/saved_model.pbtxt").write_text(text_format.MessageToString(saved))
    binary.unlink()
    several = half.several(tf.constant(IMAGE), tf.constant([1, 2, 3], tf.int64))
    np.savez(
        root / "expected.npz",
        y=half.predict(tf.constant(X))["y"].numpy(),
        total=several["total"].numpy(),
        keras=keras,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
