"""An arena's geometry, checked and measured, for the process that creates it. Header only."""

from libc.stdint cimport uint64_t
from libc.string cimport memset
from slot_verbs cimport *


cdef inline ArenaHeader* lay_out(ArenaHeader* header, int slots, int max_rows, inputs, outputs, int workers, int fronts) except NULL:
    if not 1 <= max_rows <= MAX_BATCH_ROWS or not 1 <= slots <= 65536:
        raise ValueError(f"a ring has 1..65536 slots of 1..{MAX_BATCH_ROWS} rows, not {slots} of {max_rows}")
    if not 1 <= workers <= MAX_WORKERS or not 1 <= fronts <= MAX_FRONTS:
        raise ValueError(f"a ring joins 1..{MAX_FRONTS} fronts and 1..{MAX_WORKERS} workers, not {fronts} and {workers}")
    if len(inputs) > MAX_COLUMNS or len(outputs) > MAX_COLUMNS:
        raise ValueError(f"a ring has at most {MAX_COLUMNS} columns on each side")
    memset(header, 0, sizeof(ArenaHeader))
    header.slots, header.max_rows, header.workers, header.fronts = slots, max_rows, workers, fronts
    header.inputs, header.outputs = len(inputs), len(outputs)
    for i, row_bytes in enumerate(inputs):
        header.input_row_bytes[i] = row_bytes
    for i, row_bytes in enumerate(outputs):
        header.output_row_bytes[i] = row_bytes
    arena_measure(header)
    return header


cdef inline uint64_t slab_pages_bytes(int pages):
    return ((8 * pages + 192 + SLAB_PAGE - 1) // SLAB_PAGE + 1 + pages) * SLAB_PAGE if pages else 0
