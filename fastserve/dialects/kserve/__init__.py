"""The Open Inference Protocol V2 with Triton's extensions, over HTTP and gRPC. Start at `spec`."""
