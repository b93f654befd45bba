"""The operator's own API: probes, the metrics page, Triton's metrics port, and the console."""
