"""Apps: the models of one script, served. `serve` and `App` are what a script calls."""
