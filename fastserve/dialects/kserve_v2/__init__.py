"""The Open Inference Protocol V2 with Triton's extensions. Start at `spec`; `infer` is the main call."""
