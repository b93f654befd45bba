"""TensorFlow Serving's REST API. Start at `dialect`; `predict` and `classify` are the inference calls."""

from fastserve.dialects.tfserving.dialect import TFServing

__all__ = ["TFServing"]
