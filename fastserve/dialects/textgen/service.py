"""What every endpoint of this dialect shares in one front process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic_ns

from fastserve.config import TextgenOptions
from fastserve.dialects.textgen.figures import Figures
from fastserve.dialects.textgen.running import Running
from fastserve.errors import ServeError
from fastserve.serving.dialect import ServingContext
from fastserve.serving.service import DialectService
from fastserve.serving.text import TextModel, Texts
from fastserve.serving.text.answering import About, answer_text
from fastserve.serving.text.images import ImageRules, Images
from fastserve.wire.call import Call

NAME = "textgen"


def image_rules(options: TextgenOptions) -> ImageRules:
    """What clients may name as an image."""
    return ImageRules(
        root=options.image_root,
        urls=options.image_urls,
        private=options.image_urls_private,
        most_bytes=options.image_mb << 20,
    )


class Service(DialectService):
    """One dialect's state in one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        super().__init__(context, NAME)
        self.options = options
        self.texts = Texts(context, options.default_model)
        self.images = Images(image_rules(options))
        self.running, self.figures = Running(), Figures(context.registry)

    def read(self, call: Call, model: TextModel) -> None:
        """A call was read, and is about to be asked of the model."""
        decoded = self.traffic.stages(model.name, model.version.number)[0]
        decoded.observe_ns(monotonic_ns() - call.received_ns)

    async def answer(
        self,
        call: Call,
        answer: Callable[[About], Awaitable[bool]],
        refuse: Callable[[Service, Call, ServeError, str], None],
    ) -> None:
        """The life of one call (`answer_text`), refused by an API's own function."""
        await answer_text(call, self.traffic, answer, partial(refuse, self, call))

    def count(self, call: Call, model: TextModel) -> None:
        """A call was answered well."""
        self.traffic.answered(model.name, model.version.number, call.received_ns)
