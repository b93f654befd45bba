// Whole reply bodies of TF Serving's REST API (spec tfserving 3.3, 3.5, 1.5), byte for byte.
//
// A reply is sized by size_x, which also finds what is wrong with it, and then written by put_x into
// memory of at least that size plus WIDE_STORE. Only these functions know the literal layout.
#pragma once
#include "tensor_text.h"

struct NamedText {
    TensorText tensor;          // in row replies: one row; tensor.bytes is of all rows
    const char *key;            // the name as a JSON string, quotes included
    int64_t key_bytes;
};

struct Reply {
    const NamedText *outputs;
    int count;
    int64_t rows;
    // result keys of classify and regress; the outputs are then {labels, scores} or {values}
    const NamedText *keys;
    int key_count;
};

typedef char *(*PutReply)(char *at, const Reply &reply);
typedef TextFault (*SizeReply)(const Reply &reply, int *which, int64_t *bound);

static constexpr int REPLY_FRAME = 64;      // literal text around and between what is counted

static inline char *put_key(char *at, const NamedText &output)
{
    return put(put_bytes(at, output.key, output.key_bytes), ": ");
}

// ---- {"predictions": [...]} --------------------------------------------------------------------

static inline char *put_row_objects(char *at, const Reply &reply)
{
    const uint8_t *from_few[16];
    const uint8_t **from = reply.count <= 16 ? from_few : new const uint8_t *[reply.count];
    for (int k = 0; k < reply.count; k++)
        from[k] = reply.outputs[k].tensor.data;
    for (int64_t row = 0; row < reply.rows; row++) {
        at = put(at, "\n        {");
        for (int k = 0; k < reply.count; k++) {
            at = put_key(put(at, "\n            "), reply.outputs[k]);
            at = put_tensor_line(at, reply.outputs[k].tensor, from[k], 3);
            *at++ = ',';
        }
        at = put(at - 1, "\n        },");
    }
    if (from != from_few)
        delete[] from;
    return at - 1;
}

static char *put_predictions(char *at, const Reply &reply)
{
    at = put(at, "{\n    \"predictions\": [");
    if (reply.rows == 0)
        return put(at, "]\n}");
    at = reply.count == 1 ? put_tensor_rows(at, reply.outputs[0].tensor, reply.rows, 2) : put_row_objects(at, reply);
    return put(at, "\n    ]\n}");
}

static TextFault size_predictions(const Reply &reply, int *which, int64_t *bound)
{
    int64_t total = REPLY_FRAME, each;
    for (*which = 0; *which < reply.count; ++*which) {
        const NamedText &output = reply.outputs[*which];
        TextFault fault = size_tensor(output.tensor, reply.rows, reply.count == 1 ? 2 : 3, false, false, &each);
        if (fault != TEXT_OK)
            return fault;
        int64_t frame = reply.count == 1 ? 0 : output.key_bytes + REPLY_FRAME;
        if (__builtin_mul_overflow(frame, reply.rows, &frame) || __builtin_add_overflow(total, frame, &total)
            || __builtin_add_overflow(total, each, &total))
            return TEXT_TOO_LARGE;
    }
    *bound = total;
    return TEXT_OK;
}

// ---- {"outputs": ...} --------------------------------------------------------------------------

static char *put_outputs(char *at, const Reply &reply)
{
    at = put(at, "{\n    \"outputs\": ");
    if (reply.count == 1)
        return put(put_tensor_spread(at, reply.outputs[0].tensor, 1), "\n}");
    *at++ = '{';
    for (int k = 0; k < reply.count; k++) {
        at = put_key(put(at, "\n        "), reply.outputs[k]);
        at = put_tensor_spread(at, reply.outputs[k].tensor, 2);
        *at++ = ',';
    }
    return put(at - 1, "\n    }\n}");
}

static TextFault size_outputs(const Reply &reply, int *which, int64_t *bound)
{
    int64_t total = REPLY_FRAME, each;
    for (*which = 0; *which < reply.count; ++*which) {
        const NamedText &output = reply.outputs[*which];
        TextFault fault = size_tensor(output.tensor, 1, 2, true, false, &each);
        if (fault != TEXT_OK)
            return fault;
        if (__builtin_add_overflow(total, each + output.key_bytes + REPLY_FRAME, &total))
            return TEXT_TOO_LARGE;
    }
    *bound = total;
    return TEXT_OK;
}

// ---- {"results": ...} --------------------------------------------------------------------------

// Write `value` under every result key.
template <class Value>
static inline char *put_under_keys(char *at, const Reply &reply, Value put_value)
{
    *at++ = '{';
    for (int k = 0; k < reply.key_count; k++) {
        at = put_value(put_key(put(at, "\n    "), reply.keys[k]));
        *at++ = ',';
    }
    return put(at - 1, "\n}");
}

static inline char *put_class(char *at, const uint8_t *&label, const uint8_t *&score)
{
    *at++ = '[';
    at = label ? StringItem::put_item(at, label, 0) : put(at, "\"\"");
    at = put(at, ", ");
    at = score ? FloatItem<float, FLOAT_TFS>::put_item(at, score, 0) : put(at, "0.0");
    return put(at, "], ");
}

static char *put_classifications(char *at, const Reply &reply)
{
    return put_under_keys(at, reply, [&](char *at) {
        const uint8_t *label = reply.outputs[0].tensor.data, *score = reply.outputs[1].tensor.data;
        int64_t classes = reply.outputs[0].tensor.shape[0];
        *at++ = '[';
        for (int64_t row = 0; row < reply.rows; row++) {
            *at++ = '[';
            for (int64_t k = 0; k < classes; k++)
                at = put_class(at, label, score);
            at = put(at - (classes > 0 ? 2 : 0), "], ");
        }
        return put(at - 2, "\n    ]");
    });
}

static char *put_regressions(char *at, const Reply &reply)
{
    return put_under_keys(at, reply, [&](char *at) {
        *at++ = '[';
        at = put_tensor_rows(at, reply.outputs[0].tensor, reply.rows, 2);
        *at++ = ']';
        return at;
    });
}

// Both: rows > 0. A tensor without data (the model has no such output) is written as its default.
static TextFault size_results(const Reply &reply, int *which, int64_t *bound)
{
    int64_t total = REPLY_FRAME, each;
    for (*which = 0; *which < reply.count; ++*which) {
        const TensorText &tensor = reply.outputs[*which].tensor;
        TextFault fault = tensor.data ? size_tensor(tensor, reply.rows, 2, false, false, &each) : TEXT_OK;
        if (fault != TEXT_OK)
            return fault;
        if (!tensor.data)
            each = 0;
        int64_t classes = tensor.rank ? tensor.shape[0] : 1, frame;
        if (__builtin_mul_overflow(classes, (int64_t)16, &frame)
            || __builtin_mul_overflow(frame + 8, reply.rows, &frame)
            || __builtin_add_overflow(total, each, &total) || __builtin_add_overflow(total, frame, &total))
            return TEXT_TOO_LARGE;
    }
    int64_t keys = REPLY_FRAME;
    for (int k = 0; k < reply.key_count; k++)
        keys += reply.keys[k].key_bytes + 16;
    if (__builtin_mul_overflow(total, (int64_t)reply.key_count, &total))
        return TEXT_TOO_LARGE;
    *bound = total + keys;
    return TEXT_OK;
}

// ---- bare values -------------------------------------------------------------------------------

static char *put_values(char *at, const Reply &reply)
{
    return put_tensor_rows(at, reply.outputs[0].tensor, 1, FLAT);
}

static TextFault size_values(const Reply &reply, int *which, int64_t *bound)
{
    *which = 0;
    TextFault fault = size_tensor(reply.outputs[0].tensor, 1, FLAT, false, true, bound);
    *bound += REPLY_FRAME;
    return fault;
}

// ---- head, Content-Length and a row reply ------------------------------------------------------

struct Framed {
    Reply reply;                // first: put_framed is a PutReply and finds the rest behind it
    const char *head;
    int64_t head_bytes;
    int64_t bound;              // of the body
};

// The body's length is known only once it is written: it is written behind room for as many digits
// as its bound has, and moved when it turns out to have fewer.
static char *put_framed_by(char *at, const Reply &reply, char *(*put_body)(char *, const Reply &))
{
    const Framed &framed = reinterpret_cast<const Framed &>(reply);
    char line[24];
    at = put(put_bytes(at, framed.head, framed.head_bytes), "Content-Length: ");
    char *body = at + (put_integer(line, framed.bound) - line) + 4;
    char *end = put_body(body, reply);
    char *fit = put(put_integer(at, end - body), "\r\n\r\n");
    if (fit != body)
        memmove(fit, body, end - body);
    return fit + (end - body);
}

static char *put_framed(char *at, const Reply &reply)
{
    return put_framed_by(at, reply, put_predictions);
}

static char *put_framed_values(char *at, const Reply &reply)
{
    return put_framed_by(at, reply, put_values);
}
