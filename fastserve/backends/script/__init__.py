"""Models from a script: declarations, the JSON of their bodies, and the backends that run them in workers."""
