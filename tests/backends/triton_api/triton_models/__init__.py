"""Models written for Triton's Python backend, each a model.py of its own. Only workers import them."""
