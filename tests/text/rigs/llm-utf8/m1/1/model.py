"""One character of three bytes, over and over."""

import itertools


class Model:
    def __init__(self, config):
        pass

    def generate(self, request):
        yield from itertools.repeat((200, "中"))
