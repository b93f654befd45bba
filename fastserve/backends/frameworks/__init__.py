"""Backends by framework: onnx, torch, tensorflow and plain Python, each imported by its `load()`."""
