"""Requests, responses and errors through a relay's memory and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve.engine.relay.messages import (
    ALIGN,
    Packed,
    pack_error,
    pack_request,
    pack_response,
    unpack_reply,
    unpack_request,
)
from fastserve.errors import DeadlineError, Kind, ModelError, Reason, ServeError, worker_lost
from fastserve.net.key_usage import KeyUsage
from fastserve.request import InferRequest, InferResponse
from fastserve.tensor import DTYPES, Tensor

NAMES = st.text(min_size=1, max_size=12)
SCALARS = st.one_of(
    st.text(max_size=20), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.booleans()
)
IDS = st.one_of(st.integers(0, 2**64 - 1), st.text(max_size=20))
TENSORS = st.binary(max_size=300).map(lambda data: Tensor(DTYPES["uint8"], (1, len(data)), data))


def laid(packed: Packed) -> memoryview:
    """The message as it lies in memory, with something behind it."""
    parts, nbytes = packed
    data = b"".join(parts)
    assert len(data) == nbytes
    return memoryview(bytearray(data + b"\xff" * 100))


def plain(tensors: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (t.dtype.name, t.shape, bytes(t.data)) for name, t in tensors.items()}


@given(
    inputs=st.dictionaries(NAMES, TENSORS, max_size=5),
    parameters=st.dictionaries(NAMES, SCALARS, max_size=3),
    sequence_id=IDS,
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    numbers=st.tuples(*[st.integers(0, 2**63 - 1)] * 3),
    outputs=st.lists(NAMES, max_size=3).map(tuple),
    request_id=st.text(max_size=20),
)
def test_a_request_comes_as_it_was_sent(
    inputs, parameters, sequence_id, flags, numbers, outputs, request_id
) -> None:
    sent = InferRequest(
        inputs,
        outputs,
        request_id,
        numbers[0],
        numbers[1],
        parameters,
        sequence_id,
        flags[0],
        flags[1],
        numbers[2],
    )
    sent.times = [] if flags[2] else None
    accounts = {"team": KeyUsage("team")}
    sent.account = accounts["team"] if request_id else None
    key, came, _ = unpack_request(laid(pack_request(7, sent)), accounts.get)
    assert key == 7
    assert plain(came.inputs) == plain(inputs)
    for name in ("outputs", "request_id", "priority", "deadline_ns", "parameters", "sequence_id"):
        assert getattr(came, name) == getattr(sent, name)
    for name in ("sequence_start", "sequence_end", "timeout_us", "times", "account"):
        assert getattr(came, name) == getattr(sent, name)


def test_tensors_lie_aligned_and_are_not_copied() -> None:
    inputs = {name: Tensor(DTYPES["uint8"], (5,), b"abcde") for name in "xyz"}
    memory = laid(pack_request(1, InferRequest(inputs)))
    _, came, _ = unpack_request(memory, {}.get)
    whole = bytes(memory)
    assert [whole.index(b"abcde", at * ALIGN) % ALIGN for at in (1, 2, 3)] == [0, 0, 0]
    memory[whole.index(b"abcde")] = ord("X")
    assert bytes(came.inputs["x"].data) == b"Xbcde"


def test_a_parameter_that_is_no_plain_value_is_refused() -> None:
    for odd in (object(), 2**70, "\ud800"):
        with pytest.raises(ServeError, match="parameters are strings, numbers and bools"):
            pack_request(1, InferRequest({}, parameters={"a": odd}))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_response_comes_as_it_was_sent(repeated: bool) -> None:
    x, y = (Tensor(DTYPES["float32"], (1, 1), data) for data in (b"1234", b"5678"))
    told = [("x", x), ("y", y), ("x", y)]
    response = InferResponse({"x": x, "y": y}, parameters={"a": 1}, repeated=told if repeated else ())
    came, times = unpack_reply(laid(pack_response(response, [1, 2, 3])))
    assert (times, came.parameters) == ([1, 2, 3], {"a": 1})
    assert plain(came.outputs) == plain(response.outputs)
    assert [name for name, _ in came.in_order()] == [name for name, _ in response.in_order()]


def with_step() -> ServeError:
    error = ServeError(Kind.ABORTED, "in ensemble")
    error.step = ModelError(Kind.INTERNAL, "no")
    return error


ERRORS = [
    ServeError(Kind.UNAVAILABLE, "full", retry_after_s=2.5, reason=Reason.QUEUE_FULL),
    ModelError(Kind.INTERNAL, "model", reason=Reason.OUTPUT_ROWS),
    DeadlineError("late", queued=True, reason=Reason.QUEUE_DEADLINE),
    DeadlineError("later", queued=False),
    worker_lost("died"),
    with_step(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.message)
def test_an_error_comes_as_it_was_raised(error: ServeError) -> None:
    with pytest.raises(ServeError) as caught:
        unpack_reply(laid(pack_error(error)))
    came: ServeError | None = caught.value
    while error is not None:
        assert came is not None
        assert type(came) is type(error)
        for name in ("kind", "message", "retry_after_s", "reason"):
            assert getattr(came, name) == getattr(error, name)
        assert getattr(came, "queued", None) == getattr(error, "queued", None)
        error, came = error.step, came.step
    assert came is None
