"""The operator's page: what the server does right now and did in the last minutes, and the same as JSON."""
