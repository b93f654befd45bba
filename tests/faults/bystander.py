"""A second client on its own connection: its answers must stay right and in time, whatever is done to the
server meanwhile."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

from tests.faults.rig import Http, tensor
from tests.running import Running, until

LONGEST_S = 10.0  # generous: neighbours on the same machine must not be taken for a fault
PAUSE_S = 0.002


class Bystander:
    """Asks for health, and for a model's answer to numbers nobody else sends, one after the other.

    `model` gives its input `x` (FP32, a free axis) back as `y`. `worst_s` is the longest it waited.
    """

    def __init__(self, served: Running, model: str = "free") -> None:
        self._served, self._model = served, model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.asked = 0
        self.worst_s = 0.0
        self.wrong: list[object] = []

    def __enter__(self) -> Bystander:
        self._thread.start()
        self._answered_since(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._answered_since(self.asked)
        finally:
            self._stop.set()
            self._thread.join(60.0)
        if kind is None:
            assert not self._thread.is_alive(), "the bystander waits for ever"
            assert not self.wrong, self.wrong[:3]
            assert self.worst_s < LONGEST_S

    def _answered_since(self, asked: int) -> None:
        """Both before what is done to the server and behind it, however quick that was."""
        until(lambda: self.asked > asked or self.wrong, "the bystander is answered", 60)

    def _run(self) -> None:
        with Http(self._served) as http:
            while not self._stop.is_set():
                try:
                    self._ask(http)
                except Exception as error:
                    self.wrong.append(error)
                self._stop.wait(PAUSE_S)

    def _ask(self, http: Http) -> None:
        number = self.asked + 0.5
        body = {"inputs": [tensor("x", [1, 2], [number, -number], "FP32")]}
        found = [
            self._timed(http.ask, "GET", "/v2/health/live").status,
            self._timed(http.post, f"/v2/models/{self._model}/infer", body).json()["outputs"][0]["data"],
        ]
        if found != [200, [number, -number]]:
            self.wrong.append(found)
        self.asked += 1

    def _timed(self, ask: Any, *arguments: Any) -> Any:
        began = time.monotonic()
        answer = ask(*arguments)
        self.worst_s = max(self.worst_s, time.monotonic() - began)
        return answer
