"""Triton's config.pbtxt: read, completed, checked, and converted to a ModelConfig and back."""
