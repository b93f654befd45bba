"""Fails in initialize."""


class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("no weights")

    def execute(self, requests):
        return []
