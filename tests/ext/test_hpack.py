"""hpack against RFC 7541's own examples and the library of that name, both ways, broken blocks included."""

from __future__ import annotations

import tracemalloc
from typing import Any

import hpack
import pytest
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastserve._ext.hpack import ENTRY_BYTES, Fault, HpackDecoder, HpackFault, static_block
from tests.effort import examples
from tests.oracles.hpack import Headers, PlainDecoder, PlainEncoder

# Names and values that meet again: of the static table, of gRPC, and anything.
NAMES = st.sampled_from([b":path", b":status", b"cookie", b"te", b"grpc-timeout", b"x", b""])
VALUES = st.sampled_from([b"200", b"trailers", b"/v2/health", b"1S", b"v" * 60, b""])
TEXTS = st.binary(max_size=40)
FIELDS = st.tuples(NAMES | TEXTS, VALUES | TEXTS)
HEADERS = st.lists(FIELDS, max_size=12)
SIZES = st.sampled_from([0, 32, 64, 100, 300, 4096]) | st.integers(0, 5000)


def decode(decoder: HpackDecoder, block: bytes) -> Headers | str:
    try:
        return decoder.decode(block)
    except HpackFault as fault:
        return fault.code.name if 0 <= fault.offset <= len(block) else f"offset {fault.offset}"


def number(value: int, bits: int, pattern: int = 0) -> bytes:
    """An integer of RFC 7541 5.1."""
    written = hpack.hpack.encode_integer(value, bits)
    written[0] |= pattern
    return bytes(written)


def literal(name: bytes, value: bytes, pattern: int = 0x40) -> bytes:
    return bytes([pattern]) + number(len(name), 7) + name + number(len(value), 7) + value


# -- what the RFC says of itself -----------------------------------------------------------------

GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
GET_TLS = [(b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html"), GET[3]]
DATES = b"Mon, 21 Oct 2013 20:13:21 GMT", b"Mon, 21 Oct 2013 20:13:22 GMT"
PLACE = (b"location", b"https://www.example.com")
COOKIE = b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
REQUESTS = [GET, [*GET, (b"cache-control", b"no-cache")], [*GET_TLS, (b"custom-key", b"custom-value")]]
REPLIES = [
    [(b":status", b"302"), (b"cache-control", b"private"), (b"date", DATES[0]), PLACE],
    [(b":status", b"307"), (b"cache-control", b"private"), (b"date", DATES[0]), PLACE],
    [
        (b":status", b"200"),
        (b"cache-control", b"private"),
        (b"date", DATES[1]),
        PLACE,
        (b"content-encoding", b"gzip"),
        (b"set-cookie", COOKIE),
    ],
]
C3 = """828684410f7777772e6578616d706c652e636f6d
828684be58086e6f2d6361636865
828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565"""
C4 = """828684418cf1e3c2e5f23a6ba0ab90f4ff
828684be5886a8eb10649cbf
828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"""
C5 = """4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e17
68747470733a2f2f7777772e6578616d706c652e636f6d
4803333037c1c0bf
88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d
4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31"""
C6 = """488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff
6e919d29ad171863c78f0b97c8e9ae82ae43d3
4883640effc1c0bf
88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960
d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007"""


def blocks(lines: str, starts: tuple[int, ...] = (0, 1, 2)) -> list[bytes]:
    pieces = lines.split()
    ends = (*starts[1:], len(pieces))
    return [bytes.fromhex("".join(pieces[a:b])) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    ("sent", "said", "table_bytes", "held"),
    [
        (blocks(C3), REQUESTS, 4096, [57, 110, 164]),
        (blocks(C4), REQUESTS, 4096, [57, 110, 164]),
        (blocks(C5, (0, 2, 3)), REPLIES, 256, [222, 222, 215]),
        (blocks(C6, (0, 2, 3)), REPLIES, 256, [222, 222, 215]),
    ],
    ids=["C.3", "C.4", "C.5", "C.6"],
)
def test_the_rfc_s_sequences(
    sent: list[bytes], said: list[Headers], table_bytes: int, held: list[int]
) -> None:
    decoder = HpackDecoder(table_bytes)
    for block, headers, size in zip(sent, said, held, strict=True):
        assert decoder.decode(block) == headers
        assert decoder.table_bytes == size


@pytest.mark.parametrize(
    ("block", "field", "entries"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", (b"custom-key", b"custom-header"), 1),
        ("040c2f73616d706c652f70617468", (b":path", b"/sample/path"), 0),
        ("100870617373776f726406736563726574", (b"password", b"secret"), 0),
        ("82", (b":method", b"GET"), 0),
    ],
    ids=["C.2.1", "C.2.2", "C.2.3", "C.2.4"],
)
def test_the_rfc_s_representations(block: str, field: tuple[bytes, bytes], entries: int) -> None:
    decoder = HpackDecoder()
    assert decoder.decode(bytes.fromhex(block)) == [field]
    assert len(decoder) == entries


def test_both_tables_are_the_rfc_s() -> None:
    lowest = [index for index, _ in enumerate(hpack.hpack.HeaderTable.STATIC_TABLE, 1)]
    every = b"".join(number(index, 7, 0x80) for index in lowest)
    assert HpackDecoder().decode(every) == list(hpack.hpack.HeaderTable.STATIC_TABLE)
    for symbol in range(256):
        bits = REQUEST_CODES_LENGTH[symbol] * 4  # the symbol four times, and padding
        code = int(f"{REQUEST_CODES[symbol]:0{bits // 4}b}" * 4 + "1" * (-bits % 8), 2).to_bytes(
            -(-bits // 8), "big"
        )
        block = b"\x00\x01x" + number(len(code), 7, 0x80) + code
        assert HpackDecoder().decode(block) == [(b"x", bytes([symbol]) * 4)]


# -- what a block must not be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\x80", "MALFORMED"),  # index 0
        (b"\xbe", "MALFORMED"),  # 62, of an empty table
        (b"\x7e\x00", "MALFORMED"),  # a name of the same
        (b"\xff\xff\xff\xff\xff\xff\x0f", "MALFORMED"),  # an integer of six octets
        (b"\xff\x80\x80\x80\x80\x80\x00", "MALFORMED"),  # one of six, for nothing
        (b"\x00\x01x\xff\xff\xff\xff\xff\x0f", "MALFORMED"),  # a length beyond all memory
        (b"\x00\x01x\x05ab", "MALFORMED"),  # a text cut off
        (b"\x00\x01x", "MALFORMED"),
        (b"\x00", "MALFORMED"),
        (b"\x40\x01x\x81\x18", "MALFORMED"),  # padding of zeros
        (b"\x40\x01x\x82\x1f\xff", "MALFORMED"),  # padding of more than seven bits: 'a' and eleven ones
        (b"\x40\x01x\x81\xff", "MALFORMED"),  # padding of eight bits, and nothing else
        (b"\x40\x01x\x84\xff\xff\xff\xff", "MALFORMED"),  # the end of the string, spelled out
        (b"\x82\x20", "TABLE_SIZE"),  # a size after a field
        (b"\x3f\xe2\x1f", "TABLE_SIZE"),  # 4097
        (b"\x3f\x80\x80\x80\x80\x80\x00", "MALFORMED"),
    ],
)
def test_a_block_that_says_nothing(block: bytes, code: str) -> None:
    assert decode(HpackDecoder(), block) == PlainDecoder().decode(block) == code


def test_the_longest_integers_are_read() -> None:
    padded = b"\x00\x7f\x81\x80\x80\x80\x00" + b"n" * 128 + b"\x01v"
    assert HpackDecoder().decode(padded) == [(b"n" * 128, b"v")]


def test_seven_bits_of_padding_are_allowed() -> None:
    # A field whose text in Huffman's code ends one bit into an octet: seven ones follow.
    text = b"aaaaa"
    code = hpack.hpack.HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)
    assert HpackDecoder().decode(b"\x00\x01x" + number(len(code), 7, 0x80) + code) == [(b"x", text)]


# -- the table -----------------------------------------------------------------------------------


def test_the_generation_moves_with_the_table_and_only_then() -> None:
    decoder = HpackDecoder()
    steps: list[tuple[bytes, bool]] = [
        (b"\x82\x86", False),
        (literal(b"a", b"b", 0x00) + literal(b"a", b"b", 0x10), False),
        (literal(b"a", b"b"), True),
        (b"\xbe", False),
        (number(4096, 5, 0x20), False),  # the size it has
        (number(100, 5, 0x20), True),
        (literal(b"a", b"b" * 100), True),  # larger than the table: empties it
    ]
    for block, moves in steps:
        before = decoder.generation
        decoder.decode(block)
        assert (decoder.generation != before) == moves, block
    assert len(decoder) == 0


def test_a_name_may_come_from_the_entry_that_its_insertion_pushes_out() -> None:
    """RFC 7541 4.4: the entry is gone, its name is not."""
    decoder = HpackDecoder(64)
    decoder.decode(literal(b"name", b"v" * 20))
    assert decoder.decode(number(62, 6, 0x40) + number(24, 7) + b"w" * 24) == [(b"name", b"w" * 24)]
    assert len(decoder) == 1
    assert decoder.decode(b"\xbe") == [(b"name", b"w" * 24)]


def test_a_bomb_takes_no_memory_and_the_connection_can_go_on() -> None:
    """A block of 16 KB that stands for 64 MB: one large entry, named again and again."""
    decoder, value = HpackDecoder(), b"v" * 4000
    decoder.decode(literal(b"bomb", value))
    bomb = b"\xbe" * 16384 + literal(b"last", b"one")
    tracemalloc.start()
    with pytest.raises(HpackFault) as fault:
        decoder.decode(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fault.value.code is Fault.LIST_TOO_LARGE
    assert peak < 65536
    assert decoder.decode(b"\xbe") == [(b"last", b"one")]
    assert len(decoder) == 2  # and the table is as the block leaves it


def test_a_list_of_just_its_limit() -> None:
    field = (b"name", b"value")
    block = literal(*field, 0x00) * 3
    size = 3 * (ENTRY_BYTES + 9)
    assert HpackDecoder(list_bytes=size).decode(block) == [field] * 3
    with pytest.raises(HpackFault) as fault:
        HpackDecoder(list_bytes=size - 1).decode(block)
    assert (fault.value.code, fault.value.fields) == (Fault.LIST_TOO_LARGE, [field] * 2)


def test_the_table_never_holds_more_than_it_may() -> None:
    decoder = HpackDecoder()
    decoder.decode(b"".join(literal(b"", b"") for _ in range(1000)))
    assert (len(decoder), decoder.table_bytes) == (128, 4096)


class Connection(RuleBasedStateMachine):
    """A client of the library's, our decoder, and the library's; and our replies, read by the library."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.ours, self.plain = PlainEncoder(), HpackDecoder(), PlainDecoder()
        self.reader = PlainDecoder()
        self.known: dict[bytes, Headers] = {}
        self.generation = 0

    @rule(headers=HEADERS, huffman=st.booleans())
    def request(self, headers: Headers, huffman: bool) -> None:
        self.take(self.client.encode(headers, huffman=huffman), headers)

    def take(self, block: bytes, headers: Headers) -> None:
        assert self.ours.decode(block) == self.plain.decode(block) == headers
        if self.ours.generation != self.generation:
            self.generation = self.ours.generation
            self.known.clear()
        else:
            assert self.known.setdefault(block, headers) == headers

    @rule(size=SIZES)
    def client_shrinks(self, size: int) -> None:
        self.client.set_table_bytes(min(size, 4096))

    @rule(headers=HEADERS)
    def reply(self, headers: Headers) -> None:
        assert self.reader.decode(static_block(headers)) == headers
        assert not self.reader.entries

    @invariant()
    def tables_are_equal(self) -> None:
        assert (len(self.ours), self.ours.table_bytes) == (len(self.plain.entries), self.plain.table_bytes)


Connection.TestCase.settings = examples(60, stateful_step_count=30)
test_a_connection = Connection.TestCase


def test_secrets_are_never_indexed() -> None:
    """RFC 7541 7.1: nobody on the way puts them into a table either."""
    for name in (b"authorization", b"set-cookie"):
        assert static_block([(name, b"secret")])[0] & 0xF0 == 0x10


@pytest.mark.parametrize(
    "header", [("a", b"b"), (b"a", "b"), (b"a", bytearray(b"b")), (b"a",), (b"a", b"b", b"c"), 3]
)
def test_a_header_is_a_pair_of_bytes(header: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        static_block([header])


# -- anything ------------------------------------------------------------------------------------

INDICES = st.integers(1, 70)
PIECES = st.lists(
    st.one_of(
        st.integers(0, 200).map(lambda n: number(n, 7, 0x80)),
        SIZES.map(lambda n: number(n, 5, 0x20)),
        st.builds(literal, NAMES, VALUES, st.sampled_from([0x00, 0x10, 0x40])),
        st.tuples(st.integers(1, 70), VALUES).map(
            lambda f: number(f[0], 6, 0x40) + number(len(f[1]), 7) + f[1]
        ),
        TEXTS.map(lambda code: b"\x40\x01x" + number(len(code), 7, 0x80) + code),
        st.binary(max_size=5),
    ),
    max_size=8,
).map(b"".join)


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """A good block with a byte changed, cut out or put in."""
    block = bytearray(PlainEncoder().encode(draw(HEADERS), huffman=draw(st.booleans())))
    at = draw(st.integers(0, len(block)))
    block[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
    return bytes(block)


@examples(400)
@given(
    st.lists(PIECES | bent() | st.binary(max_size=60), min_size=1, max_size=4),
    st.sampled_from([80, 65536]),
)
def test_anything_is_read_as_the_library_reads_it(sent: list[bytes], list_bytes: int) -> None:
    ours, plain = HpackDecoder(list_bytes=list_bytes), PlainDecoder(list_bytes=list_bytes)
    for block in sent:
        found, told = decode(ours, block), plain.decode(block)
        if told == "LIST_TOO_LARGE":  # the library stops there, and may miss what else is wrong
            assert isinstance(found, str)
            return
        assert found == told
        if isinstance(told, str):
            return
        assert (len(ours), ours.table_bytes) == (len(plain.entries), plain.table_bytes)


@given(HEADERS, st.booleans())
def test_a_block_cut_anywhere_is_a_shorter_list_or_a_fault(headers: Headers, huffman: bool) -> None:
    block = PlainEncoder().encode(headers, huffman=huffman)
    for end in range(len(block)):
        found = decode(HpackDecoder(), block[:end])
        assert found == PlainDecoder().decode(block[:end])
        assert found == "MALFORMED" or found == headers[: len(found)]


@given(HEADERS)
def test_a_block_may_be_any_buffer(headers: Headers) -> None:
    block = PlainEncoder().encode(headers)
    for kind in (bytes, bytearray, memoryview):
        assert HpackDecoder().decode(kind(block)) == headers


@given(st.integers(1, 5_000_000))
@examples(5)
def test_a_long_text(size: int) -> None:
    block = static_block([(b"a", b"a" * size)])
    assert HpackDecoder(list_bytes=1 << 30).decode(block) == [(b"a", b"a" * size)]
    assert decode(HpackDecoder(), block) == ("LIST_TOO_LARGE" if size + 33 > 65536 else [(b"a", b"a" * size)])
