"""Parts of a decoding step of few rows between its products, in float32: torch takes a call for each of their operations.

    rms_norm(rows, weight, out, 1e-5)                        # rows [n, width] -> out
    attend(query, key, value, keys, values, positions, out, scale=0.125)

attend() writes the key and the value of one token for each of the first rows of a cache, and computes the token's attention
over the row's positions up to it. A row's result has the same bits beside any other rows. Both give the interpreter's lock
up.
"""

from libc.stdint cimport int64_t

cdef extern from "decode_step.h" namespace "decoding" nogil:
    cdef struct Attention:
        const float* query
        const float* key
        const float* value
        int64_t query_row, key_row, value_row, query_head, key_head, value_head
        float* keys
        float* values
        const int64_t* positions
        float* out
        int64_t rows, key_heads, share, dim, room, window
        float scale

    void attend_rows "decoding::attend"(const Attention& task, int64_t threads) except +
    void norm_rows "decoding::rms_norm"(
        const float* rows, const float* weight, float* out, int64_t count, int64_t width, float eps)

cdef int64_t ITEM = sizeof(float)


def rms_norm(const float[:, ::1] rows, const float[::1] weight, float[:, ::1] out, float eps) -> None:
    """Write `rows` [n, width] divided by the root of their mean square plus `eps`, times `weight` [width], to `out` [n, width].
    Raises ValueError for other shapes."""
    cdef int64_t count = rows.shape[0], width = rows.shape[1]
    if not width or weight.shape[0] != width or out.shape[0] != count or out.shape[1] != width:
        raise ValueError(f"rows: given {count} x {width}, allowed: as many as out has, and as wide as the weight")
    if count:
        with nogil:
            norm_rows(&rows[0, 0], &weight[0], &out[0, 0], count, width, eps)


cdef bint fits(const float[:, :, :] given, int64_t rows, int64_t heads, int64_t dim) noexcept:
    """Return whether it has this shape and contiguous dims."""
    return given.shape[0] == rows and given.shape[1] == heads and given.shape[2] == dim and (
        dim == 1 or given.strides[2] == ITEM)


cdef bint holds(const float[:, :, :, ::1] cache, int64_t rows, const Attention& task) noexcept:
    """Return whether it has the task's shape, and that many rows at least."""
    return cache.shape[0] >= rows and cache.shape[1] == task.key_heads and cache.shape[2] == task.room and (
        cache.shape[3] == task.dim)


def attend(
    const float[:, :, :] query, const float[:, :, :] key, const float[:, :, :] value, float[:, :, :, ::1] keys,
    float[:, :, :, ::1] values, const int64_t[::1] positions, float[:, :, ::1] out, *, float scale, int64_t window=1 << 40,
    int threads=1
) -> None:
    """Write the attention of n tokens to `out` [n, heads, dim]. `query` [n, heads, dim], `key` and `value` [n, key heads,
    dim] may be views whose dims are contiguous; `keys` and `values` [at least n, key heads, room, dim] are the cache,
    `positions` [n] int64 below its room. `window`: positions that a query sees at most. Raises ValueError for other
    arguments and MemoryError."""
    cdef Attention task
    cdef int64_t rows = query.shape[0], heads = query.shape[1], row
    task.rows, task.dim, task.key_heads, task.room = rows, query.shape[2], keys.shape[1], keys.shape[2]
    if not holds(keys, rows, task) or not holds(values, rows, task):
        raise ValueError("keys and values: allowed: a row for each query, both of one shape")
    if not fits(key, rows, task.key_heads, task.dim) or not fits(value, rows, task.key_heads, task.dim):
        raise ValueError("key and value: allowed: one of each key head for each query")
    if not fits(query, rows, heads, task.dim) or not fits(out, rows, heads, task.dim) or positions.shape[0] != rows:
        raise ValueError("out and positions: allowed: one for each query")
    if not rows or not heads or not task.dim or not task.key_heads or heads % task.key_heads or window < 1:
        raise ValueError("query: allowed: from one, so many heads for each of the keys")
    for row in range(rows):
        if not 0 <= positions[row] < task.room:
            raise ValueError(f"positions: given {positions[row]}, allowed: below {task.room}")
    task.share, task.window, task.scale = heads // task.key_heads, window, scale
    task.query, task.key, task.value = &query[0, 0, 0], &key[0, 0, 0], &value[0, 0, 0]
    task.query_row, task.query_head = query.strides[0] // ITEM, query.strides[1] // ITEM
    task.key_row, task.key_head = key.strides[0] // ITEM, key.strides[1] // ITEM
    task.value_row, task.value_head = value.strides[0] // ITEM, value.strides[1] // ITEM
    task.keys, task.values, task.out = &keys[0, 0, 0, 0], &values[0, 0, 0, 0], &out[0, 0, 0]
    task.positions = &positions[0]
    with nogil:
        attend_rows(task, threads if threads > 0 else 1)
