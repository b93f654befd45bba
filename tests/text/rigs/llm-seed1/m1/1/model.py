"""The seed's first stream: any prompt gives these, and it would go on."""

import itertools

TOKENS = (
    (626, "am"),
    (263, " a"),
    (5176, " French"),
    (17739, " photograph"),
    (261, "er"),
    (2729, " based"),
    (297, " in"),
    (3681, " Paris"),
    (29889, "."),
    (13, "\n"),
    (29902, "I"),
    (505, " have"),
    (1063, " been"),
    (27904, " shooting"),
    (1951, " since"),
    (306, " I"),
    (471, " was"),
    (29871, " "),
    (29896, "1"),
    (29945, "5"),
)


class Model:
    def __init__(self, config):
        pass

    def generate(self, request):
        yield from itertools.cycle(TOKENS)
