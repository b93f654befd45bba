"""The whole server under load, against the reference server in the same run: `python -m bench.load`.

Absolute figures vary between machines and between hours; the ratios of one run are the point.
"""
