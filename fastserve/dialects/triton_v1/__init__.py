"""The TensorRT Inference Server V1 API over HTTP and gRPC (docs/dialects/triton_v1.md).

A request's tensors travel raw, apart from a small header that describes them. Knows no other dialect.
"""
