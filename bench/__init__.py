"""Measurements: bench_*.py are microbenchmarks of one room each, `python -m bench.load` the whole server."""
