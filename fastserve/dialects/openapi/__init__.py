"""The description of what a listener serves: /openapi.json, and /docs for people."""
