"""Slow, plainly right twins of the compiled modules: property tests hold the two together."""
