"""HPACK by the pure-Python library `hpack`: what a block says, or why it says nothing."""

from __future__ import annotations

from collections.abc import Sequence

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError, InvalidTableSizeError, OversizedHeaderListError

Headers = list[tuple[bytes, bytes]]


class PlainDecoder:
    """`decode` gives the headers, or the name of the fault."""

    def __init__(self, table_bytes: int = 4096, list_bytes: int = 65536) -> None:
        self._decoder = Decoder(list_bytes)
        self._decoder.max_allowed_table_size = table_bytes
        self._decoder.header_table_size = min(table_bytes, 4096)

    def decode(self, block: bytes) -> Headers | str:
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            return "LIST_TOO_LARGE"
        except InvalidTableSizeError:
            return "TABLE_SIZE"
        except HPACKError as error:
            return "TABLE_SIZE" if "size update" in str(error) else "MALFORMED"

    @property
    def entries(self) -> Headers:
        """Of the dynamic table, the newest first."""
        return list(self._decoder.header_table.dynamic_entries)

    @property
    def table_bytes(self) -> int:
        return sum(32 + len(name) + len(value) for name, value in self.entries)


class PlainEncoder:
    """Writes blocks that use everything HPACK has, as a client may."""

    def __init__(self) -> None:
        self._encoder = Encoder()

    def set_table_bytes(self, table_bytes: int) -> None:
        if table_bytes != self._encoder.header_table_size:  # told twice, it would forget to say it
            self._encoder.header_table_size = table_bytes

    def encode(self, headers: Sequence[tuple[bytes, bytes]], *, huffman: bool = True) -> bytes:
        return bytes(self._encoder.encode(headers, huffman=huffman))
