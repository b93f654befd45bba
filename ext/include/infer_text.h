// Response bodies of the V2 protocol (spec triton_v2, 3.2): one line without spaces, all tensors flat.
//
//   {"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,2],"data":[0.5,1.0]}]}
//
// What stands around the data (names, shapes, parameters) comes as text that is ready: it is small and made
// elsewhere. Floats are wide_text.h's.
#pragma once
#include "tensor_text.h"
#include "wide_text.h"

// ---- tensors -----------------------------------------------------------------------------------

template <class Item>
static char *put_flat(char *at, const uint8_t *from, int64_t items)
{
    for (int64_t i = 0; i < items; i++) {
        at = Item::put_item(at, from, FLAT);
        *at++ = ',';
    }
    return at - (items > 0);
}

struct InferText {              // an output; borrows what it points to
    const char *before;         // from its brace, or the body's, up to its data
    int64_t before_bytes;
    const uint8_t *data;        // null: none, `before` is all there is
    int64_t bytes, items;
    uint8_t dtype;
};

static char *put_infer_data(char *at, const InferText &t)
{
    switch (t.dtype) {
    case DT_BOOL: return put_flat<BoolItem>(at, t.data, t.items);
    case DT_UINT8: return put_flat<IntegerItem<uint8_t>>(at, t.data, t.items);
    case DT_UINT16: return put_flat<IntegerItem<uint16_t>>(at, t.data, t.items);
    case DT_UINT32: return put_flat<IntegerItem<uint32_t>>(at, t.data, t.items);
    case DT_UINT64: return put_flat<IntegerItem<uint64_t>>(at, t.data, t.items);
    case DT_INT8: return put_flat<IntegerItem<int8_t>>(at, t.data, t.items);
    case DT_INT16: return put_flat<IntegerItem<int16_t>>(at, t.data, t.items);
    case DT_INT32: return put_flat<IntegerItem<int32_t>>(at, t.data, t.items);
    case DT_INT64: return put_flat<IntegerItem<int64_t>>(at, t.data, t.items);
    case DT_FLOAT32: return put_flat<WideItem<float>>(at, t.data, t.items);
    case DT_FLOAT64: return put_flat<WideItem<double>>(at, t.data, t.items);
    case DT_BYTES: return put_flat<StringItem>(at, t.data, t.items);
    default: return at;
    }
}

static TextFault size_infer(const InferText &t, int64_t *bound)
{
    TensorText tensor = {t.data, t.bytes, &t.items, 1, t.dtype, FLOAT_SHORTEST, false};
    int64_t room = 0;
    bool real = t.dtype == DT_FLOAT32 || t.dtype == DT_FLOAT64;
    if (t.data) {
        if (t.dtype == DT_FLOAT16 || t.dtype == DT_BFLOAT16)
            return TEXT_DTYPE;
        if (TextFault fault = size_tensor(tensor, 1, FLAT, false, true, &room))
            return fault;
        if (real && __builtin_mul_overflow(t.items, (int64_t)(DOUBLE_TEXT + 1), &room))
            return TEXT_TOO_LARGE;
    }
    *bound = room + t.before_bytes + 16;
    return *bound > INT64_MAX / 2 ? TEXT_TOO_LARGE : TEXT_OK;
}

// ---- whole bodies ------------------------------------------------------------------------------

struct InferBlob {              // an output that goes behind the JSON as it is; borrowed
    const uint8_t *data;
    int64_t bytes;
};

struct InferReply {
    const InferText *outputs;
    int count;
    const InferBlob *blobs;
    int blob_count;
    int64_t blob_bytes;         // of all of them; none: the reply is nothing but JSON
    const char *head;           // of the HTTP reply, up to its Content-Length; or null
    int64_t head_bytes;
    const char *before;         // of the body, up to and with the bracket that opens the outputs
    int64_t before_bytes;
    int64_t bound;              // of the JSON
};

static TextFault size_infer_reply(InferReply *reply, int *which)
{
    int64_t each;
    reply->bound = reply->before_bytes + 16;
    for (*which = 0; *which < reply->count; ++*which) {
        if (TextFault fault = size_infer(reply->outputs[*which], &each))
            return fault;
        if (__builtin_add_overflow(reply->bound, each, &reply->bound))
            return TEXT_TOO_LARGE;
    }
    return TEXT_OK;
}

static char *put_infer_body(char *at, const InferReply &reply)
{
    at = put_bytes(at, reply.before, reply.before_bytes);
    for (int k = 0; k < reply.count; k++) {
        const InferText &t = reply.outputs[k];
        at = put_bytes(at, t.before, t.before_bytes);
        if (t.data)
            at = put(put_infer_data(put(at, ",\"data\":["), t), "]");
        at = put(at, "},");
    }
    return put(at - (reply.count > 0), "]}");
}

static char *put_lengths(char *at, const InferReply &reply, int64_t json_bytes)
{
    if (reply.blob_bytes)
        at = put(put_integer(put(at, "Inference-Header-Content-Length: "), json_bytes), "\r\n");
    return put(put_integer(put(at, "Content-Length: "), json_bytes + reply.blob_bytes), "\r\n\r\n");
}

// The lengths are known once the JSON is written, behind room for as many digits as its bound has.
static char *put_infer_json(char *at, const InferReply &reply, int64_t *json_bytes)
{
    char lines[128];
    int64_t most = reply.head ? put_lengths(lines, reply, reply.bound) - lines : 0;
    if (reply.head)
        at = put_bytes(at, reply.head, reply.head_bytes);
    char *json = at + most;
    *json_bytes = put_infer_body(json, reply) - json;
    char *fit = reply.head ? put_lengths(at, reply, *json_bytes) : at;
    if (fit != json)
        memmove(fit, json, *json_bytes);
    return fit + *json_bytes;
}

static char *put_infer_reply(char *at, const InferReply &reply, int64_t *json_bytes)
{
    at = put_infer_json(at, reply, json_bytes);
    for (int k = 0; k < reply.blob_count; k++) {
        memcpy(at, reply.blobs[k].data, reply.blobs[k].bytes);
        at += reply.blobs[k].bytes;
    }
    return at;
}
