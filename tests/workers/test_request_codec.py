"""The compiled part of Triton's Python API: requests over slabs as they were sent, responses as the general
writer writes them, whatever their tensors are; and no object of the API can be made to lead anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve._ext.slab_tensors import SlabCodec
from fastserve.backends.triton_api.requests import CLOSED, InferenceRequest, InferenceResponse, TritonError
from fastserve.backends.triton_api.tensor import BY_NUMBER, BY_NUMPY, STRING, Tensor, TritonModelException
from fastserve.codec.slab_contents import RequestNote, read_answer_note, write_note
from fastserve.errors import Kind
from fastserve.tensor import DTYPES
from fastserve.workers.arena import Arena, Geometry
from fastserve.workers.request_codec import CODES, RequestCodec, to_entry
from fastserve.workers.requests import SILENT, TWICE, RequestBatch, RequestReply

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NUMBERS = [number for number in BY_NUMBER if number != STRING]
NO_ROOM = Kind.RESOURCE_EXHAUSTED
INPUTS, OUTPUTS = ["X", "B", "C"], ["X", "Y", "Z"]  # one can be passed on


@st.composite
def arrays(draw: Any) -> tuple[np.ndarray, int]:
    """An array and its Triton type."""
    shape = draw(SHAPES)
    kind = draw(st.sampled_from([*NUMBERS, STRING]))
    if kind == STRING:
        strings = np.empty(int(np.prod(shape)), object)
        strings[:] = draw(st.lists(st.binary(max_size=5), min_size=strings.size, max_size=strings.size))
        return strings.reshape(shape), kind
    dtype = np.dtype(BY_NUMBER[kind].numpy)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    array = np.frombuffer(raw if kind != 1 else bytes(b & 1 for b in raw), dtype).reshape(shape)
    return array, kind


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == object:
        return a.shape == b.shape and a.tolist() == b.tolist()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Rig:
    """An arena with one front and one worker, both in this process."""

    def __init__(self, **config: Any) -> None:
        self.arena = Arena.create(Geometry(4, 8, (), (), 256, 0, 1, 1, True))
        self.front, self.ring = self.arena.ring(front=0), self.arena.ring(worker=0)
        self.slabs = SlabCodec(self.arena.memory, front=0)
        backend = SimpleNamespace(
            config={"output": [{"name": name} for name in OUTPUTS], **config},
            batching=False,
            inputs=dict.fromkeys(INPUTS),
            outputs=dict.fromkeys(OUTPUTS),
            name="m",
            version=1,
            instance_name="m_0",
            where=lambda error: "",
        )
        self.codec = RequestCodec(self.arena, self.ring, backend)  # type: ignore[arg-type]
        self.kept: set[Any] = set()

    def ask(self, entries: list[Any], note: bytes = b"") -> int:
        """A request, committed; its place."""
        answer_slab = self.front.reserve(1)
        self.front.attach_slab(answer_slab, *self.slabs.put(entries, note))
        self.front.commit(answer_slab, 1)
        return answer_slab

    def take(self, answer_slab: int) -> tuple[RequestBatch, list[Any]]:
        """The batch of that place, and what is asked in it."""
        self.front.seal(answer_slab)
        slot = self.ring.take()
        leases = self.ring.leases(slot)
        batch = RequestBatch(self.ring, self.codec, slot, len(leases), self.kept)
        return batch, self.codec.read_all(batch, leases, RequestReply, False)

    def answer(self, answer_slab: int) -> tuple[int, list[Any], Any]:
        """(status, entries, note) of a place that is done; it is released."""
        assert self.front.answered(answer_slab, 1)
        entries, note = self.slabs.read(*self.front.answer_slab(answer_slab))
        found = [(number, code, shape, bytes(data)) for number, code, shape, data in entries]
        status = self.front.lease_status(answer_slab)
        self.front.release(answer_slab, 1)
        return status, found, read_answer_note(note)


@contextlib.contextmanager
def opened(**config: Any) -> Iterator[Rig]:
    rig = Rig(**config)
    try:
        yield rig
        assert rig.front.outstanding() == 0
        assert rig.ring.slab_pages_used() == 0
    finally:
        del rig.front, rig.ring, rig.slabs, rig.codec
        rig.arena.close()


def leases(rig: Rig, nbytes: int) -> Iterator[int]:
    """Until there is no room."""
    while offset := rig.ring.allocate_slab(nbytes):
        yield offset


@pytest.fixture
def rig() -> Iterator[Rig]:
    with opened() as made:
        yield made


@given(st.lists(arrays(), max_size=3), st.lists(arrays(), max_size=3), st.data())
@settings(deadline=None, max_examples=200)
def test_a_request_is_what_was_sent_and_a_response_what_was_made(
    sent: list[Any], made: list[Any], data: st.DataObject
) -> None:
    with opened() as rig:
        send_and_make(rig, sent, made, data)


def send_and_make(rig: Rig, sent: list[Any], made: list[Any], data: st.DataObject) -> None:
    answer_slab = rig.ask([to_entry(i, array, kind) for i, (array, kind) in enumerate(sent)])
    batch, (one,) = rig.take(answer_slab)
    assert [tensor.name() for tensor in one.request.inputs()] == INPUTS[: len(sent)]
    for tensor, (array, kind) in zip(one.request.inputs(), sent, strict=True):
        assert (tensor.triton_dtype(), tensor.shape()) == (kind, list(array.shape))
        if data.draw(st.booleans()):
            assert same(tensor.raw, array)
        own = tensor._own()
        assert same(own, array)
        assert own.flags.writeable
        assert own is tensor._own() is tensor.raw
    outputs = [Tensor.made_of(OUTPUTS[i], array, kind) for i, (array, kind) in enumerate(made)]
    if sent and data.draw(st.booleans()):  # one that is only passed on
        outputs.append(Tensor.made_of("never", sent[0][0], sent[0][1]))
    response = InferenceResponse(outputs)
    entries, _ = rig.codec.pack(response, one.reply.wanted)
    wanted = [
        (number, code, array.shape if shape is None else shape) for number, code, shape, array in entries
    ]
    one.reply.send(response, True)
    del one
    batch.settle()
    status, found, _ = rig.answer(answer_slab)
    assert status == 0
    assert [entry[:3] for entry in found] == wanted
    for (_, code, _, raw), (array, kind) in zip(found, made, strict=True):
        assert code == CODES[kind]
        assert raw == bytes(memoryview(to_entry(0, array, kind)[3]).cast("B") if array.size else b"")


@given(arrays())
@settings(deadline=None, max_examples=50)
def test_a_tensor_that_is_only_passed_on_travels_as_it_lies(given: Any) -> None:
    with opened() as rig:
        pass_on(rig, given)


def pass_on(rig: Rig, given: Any) -> None:
    array, kind = given
    answer_slab = rig.ask([to_entry(0, array, kind)])
    batch, (one,) = rig.take(answer_slab)
    (tensor,) = one.request.inputs()
    one.reply.send(InferenceResponse([tensor]), True)
    del one, tensor
    batch.settle()
    status, ((_, code, shape, raw),), _ = rig.answer(answer_slab)
    assert (status, code, shape) == (0, CODES[kind], array.shape)
    assert raw == bytes(memoryview(to_entry(0, array, kind)[3]).cast("B") if array.size else b"")


def test_what_the_model_keeps_is_kept_for_it(rig: Rig) -> None:
    array = np.arange(3000, dtype=np.float32)
    answer_slab = rig.ask([to_entry(0, array, BY_NUMPY[array.dtype])])
    batch, (one,) = rig.take(answer_slab)
    (tensor,) = one.request.inputs()
    one.reply.send(InferenceResponse([]), True)
    del one
    batch.settle()
    assert rig.answer(answer_slab)[:2] == (0, [])
    assert len(rig.kept) == 1  # nobody has looked at it yet, and the slab has not been given to others
    assert same(tensor.as_numpy(), array)
    assert not rig.kept


def test_a_note_says_the_rest(rig: Rig) -> None:
    note = RequestNote("7", 5, 3, 11, 2, {"k": "v"}, ["Y"], ["EXTRA"])
    array = np.zeros(2, np.int32)
    answer_slab = rig.ask([to_entry(i, array, 8) for i in (0, 3)], write_note(note))
    batch, (one,) = rig.take(answer_slab)
    request = one.request
    assert (request.request_id(), request.correlation_id(), request.flags()) == ("7", 5, 3)
    assert (request.timeout(), request.priority(), request.plain_parameters) == (11, 2, {"k": "v"})
    assert (request.requested_output_names(), one.reply.wanted) == ({"Y"}, ["Y"])
    assert [tensor.name() for tensor in request.inputs()] == ["X", "EXTRA"]
    one.reply.send(InferenceResponse([Tensor("X", array), Tensor("Y", array)]), True)
    del one, request
    batch.settle()
    _, found, _ = rig.answer(answer_slab)
    assert [entry[0] for entry in found] == [1]  # Y alone was asked for


@pytest.mark.parametrize("short", [True, False])
def test_what_a_scheduler_needs_travels_though_nobody_asked_for_it(short: bool) -> None:
    array = np.zeros(2, np.int32)
    with opened(sequence_batching={"state": [{"output_name": "Z"}]}) as rig:
        answer_slab = rig.ask([], write_note(RequestNote(outputs=["Y"])))
        batch, asked = rig.take(answer_slab)
        tensors = [Tensor(name, array) for name in (*OUTPUTS, "nobody's")]
        asked[0].reply.send(InferenceResponse(tensors, parameters=None if short else {"a": 1}), True)
        asked.clear()
        batch.settle()
        _, found, _ = rig.answer(answer_slab)
    assert [entry[0] for entry in found] == [1, 2]


def test_an_answer_without_room_is_an_error(rig: Rig) -> None:
    answer_slab = rig.ask([])
    batch, asked = rig.take(answer_slab)
    taken = [offset for size in (1 << 16, 1) for offset in leases(rig, size)]
    asked[0].reply.send(InferenceResponse([Tensor("X", np.zeros(9, np.int8))]), True)
    asked.clear()
    for offset in taken:
        rig.ring.free_slab(offset)
    batch.settle()
    assert rig.front.answered(answer_slab, 1)
    assert (rig.front.lease_status(answer_slab), rig.front.answer_slab(answer_slab)[0]) == (NO_ROOM.value, 0)
    rig.front.release(answer_slab, 1)


def test_each_request_has_one_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    answer_slab = rig.ask([])
    batch, (one,) = rig.take(answer_slab)
    reply, response = one.reply, InferenceResponse([])
    reply.send(response, False)
    with pytest.raises(TritonModelException, match=TWICE):
        reply.send(response, False)
    reply.send(None, True)
    reply.fail(Kind.INTERNAL, "too late")
    rig.codec.answer_all([response], [reply])
    assert "it had answered" in caplog.text
    batch.settle()
    del one, reply
    assert rig.answer(answer_slab)[0] == 0


class Hook(str):
    """A name that does something while its tensor is being sent, as another thread may."""

    __slots__ = ("act",)

    def __hash__(self) -> int:
        act, self.act = getattr(self, "act", None), None
        if act is not None:
            act()
        return str.__hash__(self)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("ends", ["final", "failure", "answer"])
def test_who_ends_a_request_that_is_being_answered_waits(rig: Rig, short: bool, ends: str) -> None:
    """A place that is given up under an answer would get it when it is somebody else's."""
    answer_slab = rig.ask([])
    batch, (one,) = rig.take(answer_slab)
    reply, name = one.reply, Hook("X")
    del one
    batch.settle()

    def interfere() -> None:
        if ends == "final":
            reply.send(None, True)
        elif ends == "failure":
            reply.fail(Kind.INTERNAL, "beside it")
        else:
            with pytest.raises(TritonModelException, match=TWICE):
                reply.send(InferenceResponse([]), True)
        assert rig.front.answered(answer_slab, 1) == 0

    array = np.ones(1, np.int8)
    response = InferenceResponse([Tensor(name, array)], parameters=None if short else {"a": 1})
    name.act = interfere
    reply.send(response, ends == "answer")
    assert name.act is None
    assert rig.answer(answer_slab)[:2] == (0, [(0, DTYPES["int8"].code, (1,), b"\1")])
    with pytest.raises(TritonModelException, match=CLOSED):
        reply.send(response, True)


def test_a_response_that_grows_while_it_is_sent(rig: Rig) -> None:
    """More outputs than the short way has room for, of which it saw two when it began."""
    array = np.ones(1, np.int8)
    name = Hook("X")
    response = InferenceResponse([Tensor(name, array), Tensor("Y", array)])
    name.act = lambda: response.output_tensors().extend([Tensor("Z", array)] * 40)
    answer_slab = rig.ask([])
    batch, asked = rig.take(answer_slab)
    asked[0].reply.send(response, True)
    asked.clear()
    batch.settle()
    assert len(rig.answer(answer_slab)[1]) == 42


@pytest.mark.parametrize("ends", ["forgotten", "silent", "error"])
def test_an_end_without_an_answer_is_an_error(rig: Rig, ends: str) -> None:
    answer_slab = rig.ask([])
    batch, asked = rig.take(answer_slab)
    if ends == "silent":
        asked[0].reply.send(None, True)
    if ends == "error":
        asked[0].reply.send(InferenceResponse(error=TritonError("no", TritonError.NOT_FOUND)), True)
    asked.clear()
    batch.settle()
    status, _, note = rig.answer(answer_slab)
    wanted = (Kind.NOT_FOUND, "no") if ends == "error" else (Kind.INTERNAL, SILENT)
    assert (status, note.message) == (wanted[0].value, wanted[1])


def test_what_a_model_does_to_its_lists_reaches_its_own_caller_alone(rig: Rig) -> None:
    leases = [rig.ask([]) for _ in range(2)]
    batch, asked = rig.take(leases[0])
    odd, good = InferenceResponse([]), InferenceResponse([Tensor("X", np.ones(1, np.int8))])
    odd.output_tensors().append("no tensor")
    rig.codec.answer_all([odd, good], [one.reply for one in asked])
    asked.clear()
    batch.settle()
    assert rig.answer(leases[0])[0] == Kind.INTERNAL.value
    assert rig.answer(leases[1])[1] == [(0, DTYPES["int8"].code, (1,), b"\1")]


def test_more_outputs_than_the_short_way_takes_and_odd_ones(rig: Rig) -> None:
    strided = np.arange(10, dtype=np.int64)[::2]
    outputs = [Tensor("X", strided)] * 20
    answer_slab = rig.ask([])
    batch, asked = rig.take(answer_slab)
    asked[0].reply.send(InferenceResponse(outputs), True)
    asked.clear()
    batch.settle()
    assert rig.answer(answer_slab)[1] == [(0, DTYPES["int64"].code, (5,), strided.tobytes())] * 20


@given(st.integers(0, 200), st.integers(0, 255), st.integers(0, 250))
@settings(deadline=None, max_examples=200)
def test_a_slab_that_lies_is_its_own_callers_fault(at: int, byte: int, cut: int) -> None:
    with opened() as rig:
        lie(rig, at, byte, cut)


def lie(rig: Rig, at: int, byte: int, cut: int) -> None:
    answer_slab = rig.front.reserve(1)
    offset, size = rig.slabs.put([to_entry(0, np.arange(4, dtype=np.int32), 8)])
    rig.front.slab(offset, size, True)[at % size] = byte
    rig.front.attach_slab(answer_slab, offset, size - cut % size)
    rig.front.commit(answer_slab, 1)
    batch, asked = rig.take(answer_slab)
    for one in asked:
        for tensor in one.request.inputs():
            assert tensor._own().nbytes <= size
        one.reply.send(InferenceResponse([]), True)
    known = bool(asked)
    asked.clear()
    batch.settle()
    assert rig.answer(answer_slab)[0] == (0 if known else Kind.INVALID_ARGUMENT.value)


def test_the_classes_are_ones_that_models_may_build_on() -> None:
    class Named(Tensor):
        def name(self) -> str:
            return "mine"

    class Loud(InferenceResponse):
        pass

    array = np.ones(2, np.float32)
    tensor = Named("x", array)
    assert isinstance(tensor, Tensor)
    assert tensor.name() == "mine"
    assert Loud([tensor]).output_tensors() == [tensor]
    assert Tensor(name="x", numpy_array=array).as_numpy() is array
    request = InferenceRequest("id", 3, [tensor], ["y"], "m", 2, 1, 7)
    assert (request.request_id(), request.correlation_id(), request.model_name()) == ("id", 3, "m")
    assert (request.model_version(), request.flags(), request.timeout()) == (2, 1, 7)
    response = InferenceResponse(output_tensors=[tensor], parameters={"a": 1})
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"a": 1}')
    with pytest.raises(TritonModelException, match="must be a Tensor, not int"):
        InferenceResponse([1])  # type: ignore[list-item]
    with pytest.raises(TritonModelException, match="must be a TritonError"):
        InferenceResponse([], 5)  # type: ignore[arg-type]
    with pytest.raises(TritonModelException, match="must be made of a numpy array, not list"):
        Tensor("x", [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Tensor("x")  # type: ignore[call-arg]
