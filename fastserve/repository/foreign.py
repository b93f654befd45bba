"""Models of other frameworks in a version's folder: what they are, and the call that makes them servable.

Looks at names only. Texts may reach clients: a folder is named from the model's on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastserve.backends.registry import BACKENDS, TO_ONNX

_CONVERT = "convert it: " + TO_ONNX
_WRITE = "load it in a {folder}/model.py (backend: python)"
# Ending of a file's name -> what it is, what to do
_ENDINGS = {
    ".keras": ("a Keras model", "export it as a SavedModel (model.export('saved')) and " + _CONVERT),
    ".h5": ("a Keras model", _CONVERT),
    ".tflite": ("a TensorFlow Lite model", _CONVERT),
    ".pt": (
        "a PyTorch model",
        "a TorchScript or torch.export program is served as {folder}/model.pt or model.pt2, beside a "
        "model.yaml with backend: torch, inputs and outputs; export others: "
        "torch.onnx.export(model, (x,), '{folder}/model.onnx', "
        "dynamic_axes={{'x': {{0: 'rows'}}}}, input_names=['x'])",
    ),
    ".pkl": (
        "a pickled Python object",
        _WRITE
        + ", or convert one of scikit-learn: skl2onnx.to_onnx(model, X[:1], options={{'zipmap': False}})",
    ),
    ".plan": ("a TensorRT engine", "serve the ONNX model it was built from"),
    ".bst": (
        "an XGBoost model",
        _WRITE + ", or convert it: onnxmltools.convert_xgboost(model, types)",
    ),
    ".lgb": (
        "a LightGBM model",
        _WRITE + " with lightgbm.Booster(model_file=...), or convert it: onnxmltools.convert_lightgbm("
        "lightgbm.Booster(model_file='{place}'), initial_types=..., zipmap=False), saved as "
        "{folder}/model.onnx (backend: onnx)",
    ),
    ".onnx": ("an ONNX model of another name", "rename it to {folder}/model.onnx"),
    ".py": ("Python code of another name", "rename it to {folder}/model.py"),
}
_OURS = ("model.onnx", "model.py")
_SAME = {".pth": ".pt", ".joblib": ".pkl", ".engine": ".plan", ".hdf5": ".h5", ".ubj": ".bst"}
# Whole names, where the ending says nothing: of Triton's FIL backend and KServe's LightGBM server
_NAMES = {"model.txt": ".lgb", "xgboost.model": ".bst", "xgboost.json": ".bst"}
_KINDS = {".h5": "--keras", ".tflite": "--tflite", ".keras": "--saved-model"}


def foreign_text(model: str, folder: Path) -> str:
    """What a version's folder holds that is not served as it is, and what to do; "" when nothing is known."""
    where = f"{model}/{folder.name}"
    for place, ending in _found(folder):
        if ending == "":
            return f"{where}{place} is a TensorFlow SavedModel, {_saved_model(where, place)}"
        what, to_do = _ENDINGS[ending]
        source = "saved" if ending == ".keras" else f"{where}/{place}"
        told = to_do.format(kind=_KINDS.get(ending, ""), place=source, folder=where)
        return f"{where}/{place} is {what}; {told}"
    return ""


def _saved_model(where: str, place: str) -> str:
    entry = BACKENDS["tensorflow"]
    told = _CONVERT.format(kind="--saved-model", place=f"{where}{place}", folder=where)
    if not entry.installed:
        told = f"pip install 'fastserve[{entry.extra}]', or {told}"
        return "which needs TensorFlow to run: " + told + f"; the first wants it as {where}" * bool(place)
    if place:
        return f"which is served where its files lie in {where} itself: move them up, or {told}"
    return f"which is served by backend: {entry.name}; or {told}"


def _found(folder: Path) -> Iterator[tuple[str, str]]:
    """Places within the folder, SavedModels (ending "") first. Raises OSError."""
    files = sorted(folder.iterdir())
    for child in files:
        if child.name in ("saved_model.pb", "saved_model.pbtxt"):
            yield "", ""
        elif child.is_dir() and any(child.glob("saved_model.pb*")):
            yield f"/{child.name}", ""
    for child in files:
        ending = _NAMES.get(child.name, _SAME.get(child.suffix, child.suffix))
        if child.is_file() and ending in _ENDINGS and child.name not in _OURS:
            yield child.name, ending
