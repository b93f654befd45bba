"""What is asked besides inference, and what is shown for it: at once, or when a function has it.

Who has asked for something that takes its time, as loading a model, has asked for all of it: it goes on when
the client leaves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastserve.errors import ServeError
from fastserve.wire.call import Call

Show = Callable[[Call, Any], None]
Refuse = Callable[[Call, ServeError], None]


def show_answer(
    call: Call, ask: Callable[[], Any], show: Show, refuse: Refuse
) -> Coroutine[Any, Any, None] | None:
    """Answer with what `ask` gives, or what that gives when it is waited for; `refuse` tells a ServeError."""
    try:
        shown = ask()
        if isinstance(shown, Awaitable):
            return _show_later(call, shown, show, refuse)
        show(call, shown)
    except ServeError as fault:
        refuse(call, fault)
    return None


async def _show_later(call: Call, asked: Awaitable[Any], show: Show, refuse: Refuse) -> None:
    call.on_gone = None
    try:
        show(call, await asked)
    except ServeError as fault:
        refuse(call, fault)
