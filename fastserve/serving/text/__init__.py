"""Text generation as all its dialects share it: what is asked, what comes back, and nobody's JSON.

    texts = Texts(context)                         one per dialect
    model = texts.find("llm")                      ServeError NOT_FOUND
    stream = await model.start(TextAsk(prompt="Once", sampling=Sampling(max_new_tokens=20), stop=["."]))
    async with stream:                             leaving it, however, cancels what still runs
        async for tokens in stream:                all that came since, as list[Token]
            ...
    stream.ending                                  why, the whole text, how many tokens, or the fault
    ending = await pour(stream, reply, write)      the same to a streamed reply, without a turn for each token

Here are tokenizers, chat templates, bounds of prompts, text out of tokens, stop strings, and how it ends.
What a client calls all of that, and in which words it is refused, is its dialect's.
"""

from fastserve._ext.text_tokens import Frames, Hole, Token
from fastserve.codec.text import Finish, Info, Sampling
from fastserve.serving.text.ask import (
    BadStop,
    NoTokenizer,
    PromptFault,
    PromptTooLong,
    TextAsk,
    TextTooLong,
    UnknownToken,
)
from fastserve.serving.text.detokenize import Detokenizer
from fastserve.serving.text.embed import Embedding, Vector
from fastserve.serving.text.models import TextModel, Texts
from fastserve.serving.text.pour import pour
from fastserve.serving.text.stream import Ending, TextStream, together
from fastserve.serving.text.tokenizer import Piece

__all__ = [
    "BadStop",
    "Detokenizer",
    "Embedding",
    "Ending",
    "Finish",
    "Frames",
    "Hole",
    "Info",
    "NoTokenizer",
    "Piece",
    "PromptFault",
    "PromptTooLong",
    "Sampling",
    "TextAsk",
    "TextModel",
    "TextStream",
    "TextTooLong",
    "Texts",
    "Token",
    "UnknownToken",
    "Vector",
    "pour",
    "together",
]
