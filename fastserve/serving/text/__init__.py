"""Text generation as all dialects share it: requests, streams of tokens, embeddings; no dialect's JSON.

    texts = TextModels(context)                    one per dialect
    model = texts.find("llm")                      ServeError NOT_FOUND
    stream = await model.start(TextAsk(prompt="Once", sampling=Sampling(max_new_tokens=20), stop=["."]))
    async with stream:                             leaving the block cancels a sequence that still runs
        async for tokens in stream:                all new tokens, as list[Token]
            ...
    stream.ending                                  the reason, the whole text and its token ids, or the fault
    ending = await stream_to(stream, reply, write) the same to a streamed reply, with no task switch per token

Tokenizers, chat templates, bounds of prompts, detokenization, stop strings and endings are here. Names of
parameters and the text of refusals belong to each dialect.
"""

from fastserve._ext.text_tokens import EventTemplate, Placeholder, Token
from fastserve.codec.generation import Finish, Info, Sampling
from fastserve.serving.text.models import (
    BadStop,
    PromptFault,
    PromptTooLong,
    SettingFault,
    TextAsk,
    TextModel,
    TextModels,
    TextTooLong,
    UnknownToken,
)
from fastserve.serving.text.stream import Embedding, Ending, TextStream, Vector, stream_to, together
from fastserve.serving.text.tokenizer import Detokenizer, NoTokenizer, Piece

__all__ = [
    "BadStop",
    "Detokenizer",
    "Embedding",
    "Ending",
    "EventTemplate",
    "Finish",
    "Info",
    "NoTokenizer",
    "Piece",
    "Placeholder",
    "PromptFault",
    "PromptTooLong",
    "Sampling",
    "SettingFault",
    "TextAsk",
    "TextModel",
    "TextModels",
    "TextStream",
    "TextTooLong",
    "Token",
    "UnknownToken",
    "Vector",
    "stream_to",
    "together",
]
