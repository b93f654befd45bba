"""MindIE's own API: /infer, its Triton endpoints, management."""
