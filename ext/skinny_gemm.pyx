"""Float32 products of few rows with a weight, which is read once where it lies: a step of few sequences waits for memory.

    gemm = SkinnyGemm(weight)                    # [outputs, inputs], kept
    gemm.multiply(rows, out)                     # out = rows @ weight.T, rows [1 to MOST_ROWS, inputs]
    gemm.multiply(rows, out, hidden, 0.5, 2)     # out = hidden + 0.5 * (rows @ weight.T), by two threads

A row's result has the same bits beside any other rows. x86-64 with AVX2 or AVX-512. multiply() gives the interpreter's
lock up.
"""

from libc.stdint cimport int64_t

cdef extern from "skinny_gemm.h" namespace "skinny" nogil:
    const int64_t SKINNY_MOST_ROWS "skinny::MOST_ROWS"

    cdef struct Task:
        const float* rows
        const float* weight
        const float* bias
        const float* base
        float* out
        int64_t count, outputs, inputs
        float scale

    ctypedef void Compute(const Task& task, int64_t begin, int64_t end)
    Compute* find_form(int lanes)
    bint has_threads()
    void run(const Task& task, Compute* form, unsigned threads)

MOST_ROWS = SKINNY_MOST_ROWS


def is_supported(int threads=1, int lanes=0) -> bool:
    """Return whether this CPU runs such products, by several threads if asked: those of the OpenMP that the process has
    loaded, as torch does. `lanes`: 8 for AVX2, 16 for AVX-512, 0 for either."""
    return find_form(lanes) != NULL and (threads < 2 or has_threads())


cdef class SkinnyGemm:
    """A weight [outputs, inputs], with a bias [outputs] or None, both float32 and contiguous. `lanes`: see is_supported().
    Raises ValueError."""

    cdef const float[:, ::1] weight
    cdef const float[::1] bias
    cdef Task task
    cdef Compute* form

    def __init__(self, const float[:, ::1] weight, const float[::1] bias=None, *, int lanes=0) -> None:
        self.form = find_form(lanes)
        if self.form == NULL:
            raise ValueError("this CPU has no such product")
        if not weight.shape[0] or not weight.shape[1] or (bias is not None and bias.shape[0] != weight.shape[0]):
            raise ValueError(f"weight: given {weight.shape[0]} x {weight.shape[1]}, allowed: from 1, one for each bias")
        self.weight, self.bias = weight, bias
        self.task.outputs, self.task.inputs = weight.shape[0], weight.shape[1]
        self.task.weight = &weight[0, 0]
        self.task.bias = self.task.base = NULL
        if bias is not None:
            self.task.bias = &bias[0]

    def multiply(
        self, const float[:, ::1] rows, float[:, ::1] out, const float[:, ::1] base=None, float scale=1.0, int threads=1
    ) -> None:
        """Write the product of `rows` [n, inputs] to `out` [n, outputs]: with `base` [n, outputs], which may be `out`,
        `base` plus the product times `scale`. Raises ValueError for other shapes and for more than MOST_ROWS rows."""
        cdef Task task = self.task
        task.count, task.scale = rows.shape[0], scale
        if not 0 < task.count <= SKINNY_MOST_ROWS or rows.shape[1] != task.inputs:
            raise ValueError(f"rows: given {rows.shape[0]} x {rows.shape[1]}, allowed: 1 to {MOST_ROWS} x {task.inputs}")
        if out.shape[0] != task.count or out.shape[1] != task.outputs:
            raise ValueError(f"out: given {out.shape[0]} x {out.shape[1]}, allowed: {task.count} x {task.outputs}")
        if base is not None and (base.shape[0] != task.count or base.shape[1] != task.outputs):
            raise ValueError(f"base: given {base.shape[0]} x {base.shape[1]}, allowed: {task.count} x {task.outputs}")
        task.rows, task.out = &rows[0, 0], &out[0, 0]
        if base is not None:
            task.base = &base[0, 0]
        with nogil:
            run(task, self.form, threads if threads > 0 else 1)
