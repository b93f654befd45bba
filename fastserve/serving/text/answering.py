"""The life of one call for text, whichever its API: whatever goes wrong is told, what went well is counted.

async def answer(about: About) -> bool:                     replies, or sends a stream
    about.model = texts.find(name)
    ...
    return True

await answer_text(call, service.traffic, answer, refuse)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastserve.errors import ServeError
from fastserve.metrics.traffic import Traffic
from fastserve.serving.exchange import unforeseen
from fastserve.serving.text.models import TextModel
from fastserve.wire.call import Call


class About:
    """What is known of a call so far."""

    model: TextModel | None = None

    @property
    def name(self) -> str:
        """The model's; "" while it is not known."""
        return "" if self.model is None else self.model.name


async def answer_text(
    call: Call,
    traffic: Traffic,
    answer: Callable[[About], Awaitable[bool]],
    refuse: Callable[[ServeError, str], None],
) -> None:
    """Answer a call; when this returns, it was, unless its client is gone.

    `answer` says whether it ended well, and raises while nothing is sent; `refuse` tells what is wrong, and
    counts it for the model of that name."""
    about = About()
    try:
        well = await answer(about)
    except ServeError as fault:
        refuse(fault, about.name)
    except ConnectionResetError:
        raise
    except Exception as error:
        try:
            refuse(unforeseen(call, error), about.name)
        except Exception:  # it was answered before
            call.fail(error)
    else:
        if well and about.model is not None:
            traffic.answered(about.name, about.model.version.number, call.received_ns)
