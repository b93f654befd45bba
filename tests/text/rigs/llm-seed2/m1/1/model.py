"""The seed's second stream: any prompt gives these, and it would go on."""

import itertools

TOKENS = ((5122, ":"), (7552, ")"), (40, "I"), (2776, "'m"), (4102, " "))


class Model:
    def __init__(self, config):
        pass

    def generate(self, request):
        yield from itertools.cycle(TOKENS)
