"""State that all text endpoints share in one front process: models, images, metrics, running requests."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns

from fastserve.dialects.text_common.mindie_metrics import MindieMetrics
from fastserve.errors import Kind, ServeError
from fastserve.metrics import Metric, Registry
from fastserve.net.request import Call
from fastserve.serving.dialect import DialectService, ServingContext
from fastserve.serving.text import TextModel, TextModels, TextStream
from fastserve.serving.text.images import ImageRules, Images
from fastserve.serving.text.models import TextCall, answer_text
from fastserve.settings import TextgenOptions


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One running request. `stopped`: its client asked for an early, successful end."""

    stream: TextStream
    stopped: bool = False


REQUESTS = Metric("_textgen_requests", "Requests that run.", "gauge", ("model",))


class RunningRequests:
    """The running requests of one front process, and how many all of them have."""

    def __init__(self, registry: Registry) -> None:
        self._held: dict[str, RunningRequest] = {}
        self._registry, self._counts = registry, registry.gauges(REQUESTS)

    @contextlib.contextmanager
    def hold(self, model: str, request_id: str, stream: TextStream) -> Iterator[RunningRequest]:
        """Register a request while the block runs; "" is no id. Raises ServeError for an id in use."""
        if request_id in self._held:
            raise ServeError(Kind.ALREADY_EXISTS, "Duplicate request id")
        held = RunningRequest(stream)
        self._counts.of(model).add(1)
        if request_id:
            self._held[request_id] = held
        try:
            yield held
        finally:
            self._held.pop(request_id, None)
            self._counts.of(model).add(-1)

    def count(self, model: str) -> int:
        """Requests of a model, in all front processes."""
        (found,) = self._registry.read(REQUESTS)
        return int(found.get((model,), (0,))[0])

    def stop(self, request_id: str) -> bool:
        """End a request with what it has; False when there is none of that id."""
        held = self._held.get(request_id)
        if held is None:
            return False
        held.stopped = True
        held.stream.cancel()
        return True


NAME = "textgen"


def image_rules(options: TextgenOptions) -> ImageRules:
    """Return the rules for images that clients may name."""
    return ImageRules(
        root=options.image_root,
        urls=options.image_urls,
        private=options.image_urls_private,
        most_bytes=options.image_mb << 20,
    )


class TextService(DialectService):
    """The state of all text endpoints in one front process."""

    def __init__(self, context: ServingContext, options: TextgenOptions) -> None:
        super().__init__(context, NAME)
        self.options = options
        self.texts = TextModels(context, options.default_model)
        self.images = Images(image_rules(options))
        self.running, self.figures = (
            RunningRequests(context.registry),
            MindieMetrics(context.registry, context.state),
        )

    def read(self, call: Call, model: TextModel) -> None:
        """A call was read, and is about to be asked of the model."""
        decoded = self.traffic.stages(model.name, model.version.number)[0]
        decoded.observe_ns(monotonic_ns() - call.received_ns)

    async def answer(
        self,
        call: Call,
        answer: Callable[[TextCall], Awaitable[bool]],
        refuse: Callable[[TextService, Call, ServeError, str], None],
    ) -> None:
        """The life of one call (`answer_text`), refused by an API's own function."""
        await answer_text(call, self.traffic, answer, partial(refuse, self, call))

    def count(self, call: Call, model: TextModel) -> None:
        """A call was answered well."""
        self.traffic.answered(model.name, model.version.number, call.received_ns)
