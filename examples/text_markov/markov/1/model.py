"""A text model of one's own: words that followed the last two, drawn from a small book of them.

fastserve serve examples/text_markov
curl -N http://127.0.0.1:8000/infer -d '{"inputs": "A request", "stream": true, "parameters": {"seed": 7}}'
"""

import random
from collections import defaultdict
from pathlib import Path

END = "."


class Model:
    def __init__(self, config):
        self.folder = Path(config["version_dir"])
        self.after = defaultdict(list)

    def load(self):
        words = (self.folder / "book.txt").read_text().split()
        for first, second, third in zip(words, words[1:], words[2:], strict=False):
            self.after[first, second].append(third)
            self.after[second].append(third)
        self.starts = sorted({first for first, _ in (key for key in self.after if isinstance(key, tuple))})

    def generate(self, request):
        """One word a step. What is drawn depends on the request's seed, never on who shares the worker."""
        rng = random.Random(request.sampling.seed)
        words = request.text.split()
        while True:
            known = self.after.get(tuple(words[-2:])) or self.after.get(words[-1]) or self.starts
            words.append(rng.choice(known))
            yield " " + words[-1]
            if words[-1].endswith(END):
                return  # an end of sequence; max_new_tokens and clients that leave end it as well
