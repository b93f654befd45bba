"""Sixty-four small requests as HEADERS and DATA, read; the baseline reads the same with hyperframe."""

from hyperframe.frame import DataFrame, Frame, HeadersFrame
from pytest_benchmark.fixture import BenchmarkFixture

from fastserve._ext.http2_frames import REQUEST, SETTINGS, FrameReader, frame

BLOCK, BODY = bytes(range(40)), b'{"instances": [[0.1234567890123456, 1.2345678901234567]]}'
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")
REQUESTS = b"".join(
    HeadersFrame(number, data=BLOCK, flags=["END_HEADERS"]).serialize()
    + DataFrame(number, data=BODY, flags=["END_STREAM"]).serialize()
    for number in range(1, 129, 2)
)


def test_read(benchmark: BenchmarkFixture) -> None:
    reader = FrameReader(16384, 65536, 16)
    reader.read(GREETING, len(GREETING))
    events = benchmark(reader.read, REQUESTS, len(REQUESTS))
    assert [event[0] for event in events] == [REQUEST] * 64
    assert {event[1] for event in events} == {BODY}


def test_baseline(benchmark: BenchmarkFixture) -> None:
    def read() -> list[Frame]:
        data, found = memoryview(REQUESTS), []
        while data:
            one, size = Frame.parse_frame_header(data[:9])
            one.parse_body(data[9 : 9 + size])
            found.append(one)
            data = data[9 + size :]
        return found

    assert len(benchmark(read)) == 128
