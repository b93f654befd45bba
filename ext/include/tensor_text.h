// Tensors as JSON lists. The layouts are those of spec tfserving 3.3:
//
//   line     [[1.0, 2.0], [3.0, 4.0]]           separators ", ", no line breaks
//   spread   one item a line, 4 spaces a level  (columnar replies)
//   b64      {"b64": "..."} takes three lines in both, indented by `depth`, the number of
//            containers open around it; FLAT, a depth below zero, keeps it on one line
//
// `from` walks over the elements; sizes were checked by size_tensor. Never recursive beyond MAX_RANK.
#pragma once
#include "float64_text.h"
#include "tensor.h"

static constexpr int MAX_RANK = 64;
static constexpr int FLAT = -1000;

struct TensorText {             // a tensor, or one row of one; borrows what it points to
    const uint8_t *data;
    int64_t bytes;              // of data, all rows together
    const int64_t *shape;
    int rank;
    uint8_t dtype, mode;
    bool b64;
};

enum TextFault { TEXT_OK, TEXT_DTYPE, TEXT_SIZE, TEXT_PACKING, TEXT_TOO_LARGE };

// ---- one element -------------------------------------------------------------------------------

template <class T>
static inline T take(const uint8_t *&from)
{
    T value;
    memcpy(&value, from, sizeof value);
    from += sizeof value;
    return value;
}

struct BoolItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        bool value = *from++;
        memcpy(at, value ? "true    " : "false   ", 8);
        return at + (value ? 4 : 5);
    }
};

template <class T>
struct IntegerItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        return put_integer(at, take<T>(from));
    }
};

template <class T, int MODE>
struct FloatItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        return put_float<MODE>(at, take<T>(from));
    }
};

// 16-bit floats are written as the float32 they widen to, which is exact.
template <int MODE>
struct HalfItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        return put_float<MODE>(at, (float)take<_Float16>(from));
    }
};

template <int MODE>
struct BrainItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        uint32_t bits = (uint32_t)take<uint16_t>(from) << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return put_float<MODE>(at, value);
    }
};

struct StringItem {
    static inline char *put_item(char *at, const uint8_t *&from, int)
    {
        uint32_t count = take<uint32_t>(from);
        at = put_string(at, from, count);
        from += count;
        return at;
    }
};

struct Base64Item {
    static inline char *put_item(char *at, const uint8_t *&from, int depth)
    {
        uint32_t count = take<uint32_t>(from);
        *at++ = '{';
        if (depth >= 0)
            at = put_line_break(at, depth + 1);
        at = put_base64(put(at, "\"b64\": \""), from, count);
        *at++ = '"';
        if (depth >= 0)
            at = put_line_break(at, depth);
        *at++ = '}';
        from += count;
        return at;
    }
};

// Call body(item) with the item type of a tensor; the one place that knows all of them.
template <class Body>
static inline char *with_item(const TensorText &t, Body body)
{
    bool tfs = t.mode == FLOAT_TFS;
    switch (t.dtype) {
    case DT_BOOL: return body(BoolItem{});
    case DT_UINT8: return body(IntegerItem<uint8_t>{});
    case DT_UINT16: return body(IntegerItem<uint16_t>{});
    case DT_UINT32: return body(IntegerItem<uint32_t>{});
    case DT_UINT64: return body(IntegerItem<uint64_t>{});
    case DT_INT8: return body(IntegerItem<int8_t>{});
    case DT_INT16: return body(IntegerItem<int16_t>{});
    case DT_INT32: return body(IntegerItem<int32_t>{});
    case DT_INT64: return body(IntegerItem<int64_t>{});
    case DT_FLOAT16: return tfs ? body(HalfItem<FLOAT_TFS>{}) : body(HalfItem<FLOAT_SHORTEST>{});
    case DT_BFLOAT16: return tfs ? body(BrainItem<FLOAT_TFS>{}) : body(BrainItem<FLOAT_SHORTEST>{});
    case DT_FLOAT32: return tfs ? body(FloatItem<float, FLOAT_TFS>{}) : body(FloatItem<float, FLOAT_SHORTEST>{});
    case DT_FLOAT64: return tfs ? body(FloatItem<double, FLOAT_TFS>{}) : body(FloatItem<double, FLOAT_SHORTEST>{});
    case DT_BYTES: return t.b64 ? body(Base64Item{}) : body(StringItem{});
    default: return body(BoolItem{});   // no elements, or size_tensor has refused it
    }
}

// ---- lists -------------------------------------------------------------------------------------

// Items with ", " between them: the innermost loop of nearly every reply. `from` is copied because
// the compiler must otherwise believe that the text may overwrite it.
template <class Item>
static inline char *put_run(char *at, const uint8_t *&from, int64_t count, int depth)
{
    const uint8_t *here = from;
    for (int64_t i = 0; i < count; i++)
        at = put(Item::put_item(at, here, depth), ", ");
    from = here;
    return at - (count > 0 ? 2 : 0);
}

template <class Item>
static char *put_rows(char *at, const uint8_t *&from, int64_t rows, const int64_t *shape, int rank, int depth);

template <class Item>
static char *put_line(char *at, const uint8_t *&from, const int64_t *shape, int rank, int depth)
{
    if (rank == 0)
        return Item::put_item(at, from, depth);
    *at++ = '[';
    at = put_rows<Item>(at, from, shape[0], shape + 1, rank - 1, depth + 1);
    *at++ = ']';
    return at;
}

template <class Item>
static char *put_spread(char *at, const uint8_t *&from, const int64_t *shape, int rank, int depth)
{
    if (rank == 0)
        return Item::put_item(at, from, depth);
    *at++ = '[';
    for (int64_t i = 0; i < shape[0]; i++) {
        at = put_line_break(at, depth + 1);
        at = put_spread<Item>(at, from, shape + 1, rank - 1, depth + 1);
        *at++ = ',';
    }
    if (shape[0] > 0)
        at = put_line_break(at - 1, depth);
    *at++ = ']';
    return at;
}

// Rows with ", " between them and no brackets around.
template <class Item>
static char *put_rows(char *at, const uint8_t *&from, int64_t rows, const int64_t *shape, int rank, int depth)
{
    if (rank == 0)
        return put_run<Item>(at, from, rows, depth);
    for (int64_t i = 0; i < rows; i++) {
        at = put_line<Item>(at, from, shape, rank, depth);
        at = put(at, ", ");
    }
    return at - (rows > 0 ? 2 : 0);
}

static inline char *put_tensor_spread(char *at, const TensorText &t, int depth)
{
    const uint8_t *from = t.data;
    return with_item(t, [&](auto item) { return put_spread<decltype(item)>(at, from, t.shape, t.rank, depth); });
}

static inline char *put_tensor_rows(char *at, const TensorText &t, int64_t rows, int depth)
{
    const uint8_t *from = t.data;
    return with_item(t, [&](auto item) {
        return put_rows<decltype(item)>(at, from, rows, t.shape, t.rank, depth);
    });
}

// As one row; `from` is moved to the next.
static inline char *put_tensor_line(char *at, const TensorText &t, const uint8_t *&from, int depth)
{
    return with_item(t, [&](auto item) { return put_line<decltype(item)>(at, from, t.shape, t.rank, depth); });
}

// ---- sizes -------------------------------------------------------------------------------------

static inline int64_t longest_item(const TensorText &t)
{
    static const uint8_t LONGEST[DT_COUNT] = {
        0, 5, 3, 5, 10, 20, 4, 6, 11, 20, FLOAT32_TEXT, FLOAT32_TEXT, FLOAT32_TEXT, FLOAT64_TEXT, 0, 0, 0};
    return LONGEST[t.dtype];
}

// Text of all string elements, checking the packing on the way; -1 when it runs past the end.
static inline int64_t size_packed(const TensorText &t, int64_t items)
{
    const uint8_t *from = t.data, *end = t.data + t.bytes;
    int64_t total = 0;
    for (int64_t i = 0; i < items; i++) {
        if (end - from < 4)
            return -1;
        uint32_t count = take<uint32_t>(from);
        if (end - from < (int64_t)count)
            return -1;
        total += t.b64 ? (int64_t)size_base64(count) : (int64_t)size_string(from, count);
        from += count;
    }
    return from == end ? total : -1;
}

// Upper bound of the text of `rows` tensors like t that sit inside `depth` containers. Checks that
// the memory holds what the shape says. `all_dtypes` also admits what TF Serving cannot write.
static inline TextFault size_tensor(const TensorText &t, int64_t rows, int depth, bool spread, bool all_dtypes,
                                    int64_t *bound)
{
    int64_t items = rows, lists = 0;
    for (int axis = 0; axis < t.rank; axis++) {
        if (__builtin_add_overflow(lists, items, &lists) || __builtin_mul_overflow(items, t.shape[axis], &items))
            return TEXT_TOO_LARGE;
    }
    bool known = t.dtype > DT_NONE && t.dtype <= DT_BYTES && t.dtype != DT_COMPLEX64 && t.dtype != DT_COMPLEX128;
    bool tfs = known && t.dtype != DT_UINT16 && t.dtype != DT_FLOAT16 && t.dtype != DT_BFLOAT16;
    if (items > 0 && !(all_dtypes ? known : tfs))
        return TEXT_DTYPE;

    int64_t strings = 0, each, total, around;
    if (t.dtype == DT_BYTES) {
        strings = size_packed(t, items);
        if (strings < 0)
            return TEXT_PACKING;
    } else if (items > t.bytes || items * dtype_bytes(t.dtype) != t.bytes) {
        return TEXT_SIZE;
    }
    int64_t indent = 1 + INDENT * ((int64_t)(depth < 0 ? 0 : depth) + t.rank + 1);
    each = longest_item(t) + 2 + (spread ? indent : 0) + (t.b64 ? 12 + 2 * indent : 0);
    around = 4 + (spread ? 2 * indent : 0);
    if (__builtin_mul_overflow(items, each, &total) || __builtin_mul_overflow(lists, around, &lists)
        || __builtin_add_overflow(total, lists, &total) || __builtin_add_overflow(total, strings, bound))
        return TEXT_TOO_LARGE;
    return *bound > INT64_MAX / 2 ? TEXT_TOO_LARGE : TEXT_OK;
}
