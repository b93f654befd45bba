"""The TensorRT Inference Server V1 API over HTTP and gRPC (docs/dialects/triton_v1.md).

A request's tensors travel raw, beside a small header that describes them.
"""
