"""Two words and an end of sequence."""


class Model:
    info = {"eos_ids": [2]}

    def __init__(self, config):
        pass

    def generate(self, request):
        yield 100, "Hello"
        yield 101, " world"
        yield 2, ""
