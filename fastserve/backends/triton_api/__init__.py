"""Triton's Python API: the backend that runs a TritonPythonModel, and `triton_python_backend_utils`."""
