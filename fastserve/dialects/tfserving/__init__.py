"""TensorFlow Serving's REST API. Start at `spec`; `predict` and `classify` are the inference calls."""
