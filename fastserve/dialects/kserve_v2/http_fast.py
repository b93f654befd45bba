"""The fast path of POST .../infer: which requests are as one before, and what is learned of others.

Requests are known by their frame (see `frames`): all that is not an id, a number of rows or a value. For
anything else, errors included, `start` returns False having left no trace, and the general path reads the
body again; it hands what it has answered to `learn`.
"""

from __future__ import annotations

from collections.abc import Set

from fastserve._ext.infer_frame import InferFrames
from fastserve.dialects.kserve_v2.body import InferBody
from fastserve.dialects.kserve_v2.frames import About, Frame, learn
from fastserve.dialects.kserve_v2.service import Service
from fastserve.errors import ServeError
from fastserve.repository.version import Version
from fastserve.request import InferRequest
from fastserve.serving.fast_path import FastPath
from fastserve.serving.paths import open_path
from fastserve.serving.prepared import Memory
from fastserve.wire.call import Call

MOST_FRAMES = 32
# Frames never met again, beyond which nothing is learned until so many requests have been missed.
MOST_UNUSED, LEARN_AGAIN = 8, 64


class Outcome:
    """How requests of this target end."""

    answered = None

    def __init__(self, service: Service, version: Version) -> None:
        self._service, self._version = service, version

    def refused(self, exchange: Call, prepared: Frame, request_id: str, fault: ServeError) -> None:
        self._service.refuse(exchange, fault, self._version.model, version=self._version)


class FastHttp:
    """The frames of one version, for one target, before its fast path."""

    def __init__(self, path: FastPath, about: About) -> None:
        self.version = path.version
        self._path, self._about = path, about
        self._max_rows = path.queue.max_rows
        self._frames = InferFrames(MOST_FRAMES)
        self._missed = 0
        self._vain = 0  # requests that had no frame

    @classmethod
    def open(cls, service: Service, version: Version, packing: Set[object]) -> FastHttp | None:
        """That of a version; None for one that does more with a request than run or keep it."""
        plan = service.views.of(version)
        if plan.decoupled or service.forward_http:
            return None
        path = open_path(version, service.traffic, Outcome(service, version))
        return None if path is None else cls(path, About(plan, path.queue, service.regions, packing))

    def start(self, call: Call, header_bytes: int) -> bool:
        """Take the call, whose JSON has so many bytes, or return False: nothing has happened then."""
        frame: Frame | None = self._frames.find(call.body, header_bytes)  # type: ignore[assignment]
        if frame is None or frame.rows > self._max_rows:
            return False
        return self._path.start(call, frame, (call.body, header_bytes), frame.id)

    def learn(self, data: Memory, header_bytes: int, body: InferBody, request: InferRequest) -> None:
        """Remember the frame of a request that `start` did not take and the general path has answered."""
        self._missed += 1
        if self._frames.unused() + self._vain >= MOST_UNUSED:
            if self._missed % LEARN_AGAIN:
                return
            self._frames.forget_unused()
            self._vain = 0
        frame = learn(self._about, bytes(memoryview(data)[:header_bytes]), body, request)
        if frame is None:
            self._vain += 1
        else:
            self._frames.add(frame)
