"""The server's own APIs: probes, metrics, Triton's metrics port, the console, /openapi.json and /docs."""
