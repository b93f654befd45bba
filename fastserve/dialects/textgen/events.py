"""A reply that is a stream of pieces: server-sent events, or whatever an API sends one after the other.

    await send_events(service, call, name, send, tell)          send(out) writes them all

Nothing is sent before the first piece: what goes wrong until then is refused with a status, by whoever
called. What goes wrong later is one piece more, by `tell`, and the end of the reply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastserve.dialects.textgen.service import Service
from fastserve.dialects.textgen.sse import EVENTS, HEADERS, EventStream
from fastserve.errors import ServeError
from fastserve.serving.exchange import unforeseen
from fastserve.wire.call import Call

Headers = tuple[tuple[bytes, bytes], ...]


async def send_events(
    service: Service,
    call: Call,
    model: str,
    send: Callable[[EventStream], Awaitable[None]],
    tell: Callable[[ServeError], bytes],
    headers: Headers = HEADERS,
    content_type: bytes = EVENTS,
) -> bool:
    """Send all there is; whether it ended well. Raises ServeError while nothing is sent."""
    every_s = service.options.keepalive_s if content_type is EVENTS else 0.0
    async with EventStream(call, every_s, content_type, headers) as out:
        try:
            await send(out)
        except ConnectionResetError:
            raise
        except Exception as error:
            if not out.begun:
                raise
            fault = error if isinstance(error, ServeError) else unforeseen(call, error)
            service.traffic.refused(model, fault.kind.name)
            await out.write(tell(fault))
            await out.close()
            return False
        await out.close()
    return True
