"""OpenAI's API, streamed: completions of made-up prompts, or chats."""

from __future__ import annotations

import json
import random
from typing import Any

from fastserve.cli.load.requests import Request, Target, Wish, variants
from fastserve.cli.text import CHAT, PLAIN, Question, completion_body

WORDS = (
    *("the", "river", "of", "light", "came", "down", "from", "heaven", "and", "every", "man", "said", "unto"),
    *("his", "brother", "let", "us", "go", "to", "a", "city", "by", "sea", "where", "there", "is", "bread"),
)


class Completions:
    """Prompts of `length` words, answers of `tokens` tokens; with a model that ends earlier, up to these."""

    over_grpc = False
    events = True
    path, chat = PLAIN, False

    def requests(self, target: Target, wish: Wish) -> list[Request]:
        if wish.data is not None:
            return [Request(self.path, "application/json", wish.data)]
        return variants(lambda rng: Request(self.path, "application/json", self._body(wish, rng)))

    def _body(self, wish: Wish, rng: random.Random) -> bytes:
        prompt = " ".join(rng.choices(WORDS, k=wish.length))
        question = Question(prompt=prompt, chat=self.chat, max_new_tokens=wish.tokens)
        body: dict[str, Any] = {**completion_body(question, wish.model), "ignore_eos": True}
        return json.dumps(body).encode()

    def close(self) -> None:
        """Nothing is held."""


class Chats(Completions):
    """The same as messages of a user."""

    path, chat = CHAT, True
