"""Messages of remote batches against a reader in plain Python, and batches from arena to arena."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve._ext.remote_batches import (
    COPIED_BYTES,
    HEADER_BYTES,
    MOST_JOINED,
    IncomingBatches,
    MessageKind,
    OutgoingBatches,
    ProtocolFault,
    RemoteBatch,
    RemotePeer,
    WireMessage,
    read_messages,
)
from fastserve.errors import Kind
from fastserve.tensor import DTYPES, TensorSpec
from fastserve.util.tracing import TraceContext
from fastserve.workers.arena import Arena, plan_geometry
from tests.oracles import remote_batches as oracle
from tests.oracles.remote_batches import PlainMessage

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SMALL = st.binary(max_size=9)
PARTS = st.lists(st.one_of(SMALL, st.just(bytes(COPIED_BYTES // 2))), max_size=4)
FIELDS = (st.sampled_from([*MessageKind]), U64, U32, U32, U64, st.lists(st.tuples(U32, U32), max_size=3))
MESSAGES = st.builds(PlainMessage, *FIELDS, PARTS)
SMALL_MESSAGES = st.builds(PlainMessage, *FIELDS, st.lists(SMALL, max_size=4))


def plain(message: WireMessage) -> PlainMessage:
    parts = [bytes(part) for part in message.parts]
    return PlainMessage(
        message.kind, message.batch, message.rows, message.word, message.ran_ns, list(message.table), parts
    )


@given(MESSAGES)
def test_a_message_is_packed_and_read_as_by_the_oracle(message: PlainMessage) -> None:
    frames = WireMessage(*message).pack()
    assert frames == oracle.pack(message)
    (found,) = read_messages([memoryview(frame) for frame in frames])
    assert plain(found) == message
    assert type(found.kind) is MessageKind


@given(st.lists(SMALL_MESSAGES, min_size=1, max_size=5))
def test_messages_of_one_frame_are_read_one_after_the_other(messages: list[PlainMessage]) -> None:
    frame = b"".join(oracle.pack(message)[0] for message in messages)
    assert [plain(one) for one in read_messages([memoryview(frame)])] == messages


@given(st.lists(MESSAGES, min_size=1, max_size=2), st.data())
def test_damaged_frames_are_read_or_refused_as_by_the_oracle(
    messages: list[PlainMessage], data: st.DataObject
) -> None:
    packed = [oracle.pack(message) for message in messages]
    frames = [bytearray(b"".join(head for head, *_ in packed)), *map(bytearray, packed[-1][1:])]
    for _ in range(data.draw(st.integers(0, 3))):
        frame = data.draw(st.sampled_from([frame for frame in frames if frame] or [bytearray(1)]))
        at = data.draw(st.integers(0, min(len(frame), 120) - 1))
        if data.draw(st.booleans()):
            frame[at] = data.draw(st.integers(0, 255))
        else:
            del frame[at:]
    try:
        wanted = oracle.read(frames)
    except ValueError:
        with pytest.raises(ProtocolFault):
            read_messages([memoryview(frame) for frame in frames])
        return
    assert [plain(one) for one in read_messages([memoryview(frame) for frame in frames])] == wanted


def test_only_so_many_messages_lie_in_a_frame() -> None:
    one = WireMessage(MessageKind.PING).pack()[0]
    assert len(one) == HEADER_BYTES
    assert len(read_messages([one * MOST_JOINED])) == MOST_JOINED
    with pytest.raises(ProtocolFault, match=f"more than {MOST_JOINED} messages"):
        read_messages([one * (MOST_JOINED + 1)])
    with pytest.raises(ProtocolFault, match="a header of 0 bytes"):
        read_messages([b""])


X, Y = TensorSpec("x", DTYPES["int32"], (2,)), TensorSpec("y", DTYPES["int8"], (1,))
CONFIG = {
    **{"backend": "python", "max_batch_size": 8, "max_queue_rows": 32, "max_queue_bytes": 1 << 20},
    **{"max_queue_delay_us": 0, "instances": 1, "run_timeout_ms": 0},
}


class Side:
    """An arena with its front's and its worker's ring, and batches as one end of a connection sees them."""

    def __init__(self, *, dense: bool) -> None:
        self.arena = Arena.create(plan_geometry(CONFIG, {"x": X}, {"y": Y}, parted=not dense))
        self.front, self.ring = self.arena.ring(front=0), self.arena.ring(worker=0)
        self.joining: list[RemotePeer] = []
        self.sent: list[list[Any]] = []
        self.outgoing = OutgoingBatches(
            self.ring,
            memoryview(self.arena.memory),
            1,
            1,
            dense=dense,
            connections=self,
            notes=(self.arena.traces, *self.arena.traces.layout),
            in_flight=0,
            limit_ms=5,
            lost_status=Kind.RESOURCE_EXHAUSTED.value,
        )
        self.incoming = IncomingBatches(self.front, memoryview(self.arena.memory), 1, 1, dense=dense)
        self.peer = RemotePeer(b"p", 0, "p", "n", 0, None, 0.0)

    def send(self, peer: RemotePeer, frames: list[Any]) -> bool:
        assert peer is self.peer
        self.sent.append(frames)
        return True

    def send_joined(self, peer: RemotePeer) -> bool:
        joined, peer.joined, peer.joined_bytes = peer.joined, [], 0
        return self.send(peer, [b"".join(joined)])

    def told(self) -> list[WireMessage]:
        """What was sent, and what was joined."""
        if self.peer.joined:
            self.send_joined(self.peer)
        sent, self.sent = self.sent, []
        return [one for frames in sent for one in read_messages([memoryview(frame) for frame in frames])]

    def put(self, row: int, rows: int, data: bytes, *, dense: bool) -> int:
        lease: int = self.front.reserve(rows)
        assert lease & 0xFFFF == row
        if dense:
            self.front.input_rows(lease, rows, 0)[:] = data
        else:
            offset = self.front.allocate_slab(len(data))
            self.front.slab(offset, len(data), True)[:] = data
            self.front.attach_slab(lease, offset, len(data))
        self.front.commit(lease, rows)
        return lease

    def close(self) -> None:
        self.outgoing.close()
        self.incoming.close()
        del self.outgoing, self.incoming, self.front, self.ring
        self.arena.close()


@pytest.fixture
def sides(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = [Side(dense=request.param) for _ in range(2)]
    yield made
    for side in made:
        side.close()


@pytest.mark.parametrize("sides", [True, False], indirect=True, ids=["columns", "slabs"])
def test_a_batch_goes_from_arena_to_arena_and_its_answer_back(sides: list[Side]) -> None:
    """Three requests, of which the second leaves before the batch is sent, and the third fails by itself."""
    here, there = sides
    dense, data = here.arena.geometry.dense, bytes(range(48))
    spans = [(0, 2), (2, 1), (3, 3)]
    leases = [here.put(row, rows, data[8 * row : 8 * (row + rows)], dense=dense) for row, rows in spans]
    here.front.drop(leases[1], 1)
    here.front.seal(leases[0])
    slot, seq = leases[0] >> 16, here.front.seq(leases[0] >> 16)
    context = TraceContext("1" * 32, "2" * 16, True, "")
    here.arena.traces.write(0, slot, seq, 3, 3, context)
    notes, number = here.arena.traces.packed(slot, seq), (seq & 0xFFFF_FFFF) << 32 | slot << 16
    assert here.outgoing.take([here.peer]) is False
    assert here.joining == [here.peer]
    (asked,) = here.told()
    columns = [data] if dense else [data[:16], data[24:48]]
    table = [(0, 2), (3, 3)]
    assert plain(asked) == PlainMessage(MessageKind.BATCH, number, 6, 5, 0, table, [*columns, notes])
    assert (here.outgoing.flying, list(here.peer.flights)) == (1, [number])

    put = there.incoming.put(asked)
    assert bytes(there.incoming.notes) == notes
    assert [(lease & 0xFFFF, rows) for lease, rows in put] == table
    far = there.ring.take()
    assert there.ring.batch_rows(far) == 6
    assert [lease[:2] for lease in there.ring.leases(far)] == table
    if dense:
        at, row_bytes = there.ring.column_span(far, 0, True)
        there.arena.memory[at : at + 6 * row_bytes] = b"abcdef"
    else:
        assert [bytes(there.ring.slab(at, n)) for _, _, at, n in there.ring.leases(far)] == columns
        offset = there.ring.allocate_slab(2)
        there.ring.slab(offset, 2, True)[:] = b"ab"
        there.ring.answer_lease(far, 0, 0, offset, 2)
    text = there.ring.allocate_slab(4)
    there.ring.slab(text, 4, True)[:] = b"so?!"
    there.ring.answer_lease(far, 3, Kind.INTERNAL.value, text, 4)
    there.ring.publish(far)
    (told,) = read_messages([memoryview(frame) for frame in there.incoming.collect(asked, far, put)])
    failed = (3, Kind.INTERNAL.value)
    assert list(told.table) == ([failed] if dense else [(0, 0), failed])
    for lease, rows in put:
        there.front.release(lease, rows)

    here.outgoing.land(here.peer, told)
    assert (here.outgoing.flying, here.outgoing.rows, here.peer.flights) == (0, 6, {})
    here.outgoing.land(here.peer, told)  # late, and refused
    assert here.front.is_done(slot, seq)
    assert here.front.failure(slot) is None
    assert here.front.answered(leases[0], 2) == 1
    assert here.front.answered(leases[2], 3) == 2
    found = (
        here.front.output_rows(leases[0], 2, 0)
        if dense
        else here.front.slab(*here.front.answer_slab(leases[0]))
    )
    assert bytes(found) == b"ab"
    assert bytes(here.front.slab(*here.front.answer_slab(leases[2]))) == b"so?!"
    for at in (0, 2):
        here.front.release(leases[at], spans[at][1])


@pytest.mark.parametrize("sides", [True, False], indirect=True, ids=["columns", "slabs"])
def test_what_is_no_batch_is_refused_and_leaves_nothing_behind(sides: list[Side]) -> None:
    here, _ = sides
    dense = here.arena.geometry.dense
    good = WireMessage(MessageKind.BATCH, 1, 2, table=[(0, 1), (1, 1)], parts=[bytes(8)] * 2)
    if dense:
        good.parts = [bytes(16)]
    tables = [[], [(0, 1)] * 3, [(0, 2), (1, 1)], [(0, 0), (1, 1)], [(1, 1), (0, 1)], [(0, 1), (1, 2)]]
    damage = [{"rows": 0}, {"rows": 9}, *({"table": table} for table in tables)]
    damage += [{"parts": []}, {"parts": [bytes(16)] * 4}, {"parts": [b"", b""][: 1 if dense else 2]}]
    for fields in damage:
        message = WireMessage(MessageKind.BATCH, 1, 2, table=good.table, parts=good.parts)
        for name, value in fields.items():
            setattr(message, name, value)
        with pytest.raises(ProtocolFault):
            here.incoming.put(message)
        assert here.ring.take() == -1
        assert here.front.outstanding() == 0, fields
    leases = here.incoming.put(good)
    here.outgoing.take([here.peer])
    (asked,) = here.told()
    for table, parts in (
        ([], []),
        ([(0, 1)], [bytes(2)] if dense else []),
        ([(0, 0)], [bytes(2), b"x"] if dense else [b"x", b"y"]),
        ([], [bytes(3)]),
    ):
        if not dense and len(table) == len(parts):
            continue  # no answer to anybody, which is one
        message = WireMessage(MessageKind.ANSWER, asked.batch, 2, table=table, parts=parts)
        with pytest.raises(ProtocolFault):
            here.outgoing.land(here.peer, message)
    other = asked.batch ^ 1 << 40
    here.peer.flights[other] = here.peer.flights[asked.batch]
    with pytest.raises(ProtocolFault, match="another generation"):
        here.outgoing.land(here.peer, WireMessage(MessageKind.ANSWER, other, 2))
    status = Kind.INTERNAL.value
    here.outgoing.land(here.peer, WireMessage(MessageKind.ANSWER, asked.batch, 2, word=status, parts=[b"no"]))
    (answer,) = read_messages(here.incoming.collect(good, leases[0][0] >> 16, leases))
    assert (answer.word, answer.parts) == (status, [b"no"])
    for lease, rows in leases:
        here.front.release(lease, rows)


def test_workers_get_what_they_run_in_two_milliseconds() -> None:
    """Who has least gets the next batch; one that has half of what it may have gets no more."""
    side = Side(dense=True)
    peers = [RemotePeer(b"p", number, "p", "n", 0, None, 0.0) for number in range(3)]
    for run_s, most in ((0.0, 1), (0.01, 1), (0.0007, 2), (0.0001, 16), (1e-9, 16)):
        for peer in peers:
            peer.run_s, peer.flights = run_s, {}
        order = []
        while (peer := side.outgoing.choose(peers)) is not None:
            peer.flights[len(order)] = RemoteBatch(0, 0, 0, 0.0, 1)
            order.append(peer.instance)
        assert order == [0, 1, 2] * most
        assert side.outgoing.take(peers) is False
    assert side.outgoing.choose([]) is None
    side.close()


@pytest.mark.parametrize("rows", [1, 8])
def test_large_columns_are_frames_of_their_own_that_lie_in_the_arena(rows: int) -> None:
    wide = TensorSpec("x", DTYPES["int8"], (COPIED_BYTES // 4,))
    arena = Arena.create(plan_geometry(CONFIG, {"x": wide}, {"y": wide}))
    front, ring, memory = arena.ring(front=0), arena.ring(worker=0), memoryview(arena.memory)
    incoming = IncomingBatches(front, memory, 1, 1, dense=True)
    data = bytes([7]) * (rows * COPIED_BYTES // 4)
    batch = WireMessage(MessageKind.BATCH, 1, rows, table=[(0, rows)], parts=[data])
    leases = incoming.put(batch)
    slot = ring.take()
    at, row_bytes = ring.column_span(slot, 0, False)
    assert memory[at : at + rows * row_bytes] == data
    out, _ = ring.column_span(slot, 0, True)
    memory[out : out + len(data)] = data
    ring.publish(slot)
    frames = incoming.collect(batch, slot, leases)
    assert len(frames) == (1 if len(data) < COPIED_BYTES else 2)
    if len(frames) == 2:
        memory[out] = 9
        assert frames[1][0] == 9
        del frames
    front.release(*leases[0])
    incoming.close()
    with pytest.raises(ValueError, match="released"):
        memory[0]
    del front, ring, incoming
    arena.close()
