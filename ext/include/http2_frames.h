// HTTP/2 frames (RFC 9113 4 and 6) out of bytes that are split anywhere. No stream and no HPACK is known here.
//
//   PREFACE --24 bytes--> HEADER --9 bytes--> DATA --its last byte--> HEADER
//                                        \--> GATHER --its last byte--> HEADER      (all kinds but DATA)
//                                        \--> SKIP --its last byte--> HEADER        (kinds nobody knows)
//   any --a fault of the connection--> DEAD
//
// The payload of DATA is handed on in the pieces it comes in; every other frame is handed on whole, and a header
// block whole with its CONTINUATIONs. What is whole in one input is never copied.
#pragma once
#include <stdint.h>
#include <string.h>
#include <vector>

enum Http2Kind : uint8_t {
    H2_DATA, H2_HEADERS, H2_PRIORITY, H2_RST_STREAM, H2_SETTINGS, H2_PUSH_PROMISE, H2_PING, H2_GOAWAY,
    H2_WINDOW_UPDATE, H2_CONTINUATION, H2_UNKNOWN = 16, H2_FAULT,
};

enum Http2Flag : uint8_t { H2_END_STREAM = 1, H2_ACK = 1, H2_END_HEADERS = 4, H2_PADDED = 8, H2_WITH_PRIORITY = 32 };

enum Http2Error : uint32_t {
    H2_PROTOCOL_ERROR = 1, H2_FRAME_SIZE_ERROR = 6, H2_ENHANCE_YOUR_CALM = 11,
};

// Why a frame is refused; the texts are in http2_frames.pyx, in this order.
enum Http2Reason : uint8_t {
    H2_FINE, H2_BAD_PREFACE, H2_NO_SETTINGS, H2_TOO_LONG, H2_WRONG_SIZE, H2_WRONG_STREAM, H2_BAD_PADDING,
    H2_NO_INCREMENT, H2_INTERRUPTED, H2_NOT_CONTINUED, H2_PUSHED, H2_BLOCK_TOO_LONG, H2_TOO_MANY_PARTS, H2_OWN_PARENT,
};

static constexpr char H2_PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
static constexpr uint32_t H2_PREFACE_BYTES = 24;
static constexpr uint32_t H2_ROUND_BLOCK = 261;         // padding and priority of a HEADERS frame
static constexpr uint32_t H2_CONTROL_BYTES = 16384;     // of a frame that is neither DATA nor part of a header block

struct Http2Event {
    uint8_t kind;
    uint8_t flags;
    uint8_t reason;             // of a fault, H2_FINE otherwise
    bool first;                 // of DATA: the piece that begins a frame
    uint32_t stream;            // 0 with a fault of the connection
    const uint8_t *at;          // payload without padding and priority; valid until the next step or input
    uint32_t size;
    uint32_t value;             // DATA: bytes that count against windows. Else: error code or increment
};

struct Http2Reader {
    enum State : uint8_t { PREFACE, HEADER, DATA, GATHER, SKIP, DEAD };

    uint32_t most_frame;        // SETTINGS_MAX_FRAME_SIZE
    uint32_t most_block;        // bytes of a header block
    uint32_t most_parts;        // CONTINUATION frames of one block
    uint8_t state = PREFACE;
    bool settled = false;       // the client's first frame was SETTINGS
    uint8_t head[H2_PREFACE_BYTES];
    uint32_t have = 0;          // bytes of the preface or of a frame's head seen so far
    uint8_t kind = 0, flags = 0;
    uint32_t stream = 0;
    uint32_t left = 0;          // payload bytes of the current frame still to come
    uint32_t padding = 0;       // how many of them are padding
    bool pad_due = false;       // the byte that says so is still to come
    bool begins = false;        // no piece of this DATA frame was handed on
    uint32_t continued = 0;     // the stream whose header block is not complete
    uint8_t block_flags = 0;
    bool own_parent = false;
    uint32_t parts = 0;
    std::vector<uint8_t> held;  // a frame's payload so far
    std::vector<uint8_t> block; // a header block so far
    bool spent = false;         // both were handed on with the last event
    const uint8_t *at = nullptr, *end = nullptr;

    Http2Reader(uint32_t frame, uint32_t header_block, uint32_t continuations)
        : most_frame(frame), most_block(header_block), most_parts(continuations) {}

    void feed(const uint8_t *input, int64_t size) { at = input; end = input + size; }
    bool step(Http2Event *event);
    bool take_body(const Http2Event *headers, Http2Event *body);
    bool waits() const { return state == PREFACE || have || continued || state == GATHER || !settled; }

private:
    bool fail(Http2Event *event, uint32_t code, uint8_t reason, uint32_t of_stream = 0);
    bool gather_head(uint32_t wanted);
    uint32_t pass(uint32_t most);
    bool gather(Http2Event *event);
    bool begin(Http2Event *event);
    uint8_t check_size() const;
    bool check_place(Http2Event *event);
    bool take_data(Http2Event *event);
    bool take_whole(Http2Event *event, const uint8_t *payload, uint32_t size);
    bool take_headers(Http2Event *event, const uint8_t *payload, uint32_t size);
    bool take_part(Http2Event *event, const uint8_t *payload, uint32_t size);
    bool take_number(Http2Event *event, const uint8_t *payload);
};

static inline uint32_t h2_read32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline void h2_drop(std::vector<uint8_t> *bytes)
{
    std::vector<uint8_t>().swap(*bytes);        // an idle connection keeps no memory for what is over
}

inline bool Http2Reader::fail(Http2Event *event, uint32_t code, uint8_t reason, uint32_t of_stream)
{
    *event = Http2Event{H2_FAULT, 0, reason, false, of_stream, nullptr, 0, code};
    if (!of_stream)
        state = DEAD;
    return true;
}

// Takes up to `most` bytes of the input; says how many.
inline uint32_t Http2Reader::pass(uint32_t most)
{
    uint32_t count = (int64_t)most > end - at ? (uint32_t)(end - at) : most;
    at += count;
    return count;
}

inline bool Http2Reader::gather_head(uint32_t wanted)
{
    const uint8_t *from = at;
    uint32_t count = pass(wanted - have);
    memcpy(head + have, from, count);
    have += count;
    return have == wanted;
}

// What a frame of this kind may have as its length; DATA and header blocks are checked as they come.
inline uint8_t Http2Reader::check_size() const
{
    if (left > most_frame)
        return H2_TOO_LONG;
    switch (kind) {
    case H2_DATA:
        return flags & H2_PADDED && !left ? H2_WRONG_SIZE : H2_FINE;
    case H2_PRIORITY:
        return left == 5 ? H2_FINE : H2_WRONG_SIZE;
    case H2_RST_STREAM:
    case H2_WINDOW_UPDATE:
        return left == 4 ? H2_FINE : H2_WRONG_SIZE;
    case H2_PING:
        return left == 8 ? H2_FINE : H2_WRONG_SIZE;
    case H2_SETTINGS:
        return left % 6 || (flags & H2_ACK && left) || left > H2_CONTROL_BYTES ? H2_WRONG_SIZE : H2_FINE;
    case H2_GOAWAY:
        return left < 8 ? H2_WRONG_SIZE : H2_FINE;
    }
    return H2_FINE;
}

// Whether a frame of this kind may stand here, on this stream. False with a fault in `event`.
inline bool Http2Reader::check_place(Http2Event *event)
{
    if (!settled && (kind != H2_SETTINGS || flags & H2_ACK))
        return !fail(event, H2_PROTOCOL_ERROR, H2_NO_SETTINGS);
    if (continued && (kind != H2_CONTINUATION || stream != continued))
        return !fail(event, H2_PROTOCOL_ERROR, H2_INTERRUPTED);
    if (!continued && kind == H2_CONTINUATION)
        return !fail(event, H2_PROTOCOL_ERROR, H2_NOT_CONTINUED);
    if (kind == H2_PUSH_PROMISE)
        return !fail(event, H2_PROTOCOL_ERROR, H2_PUSHED);
    bool of_connection = kind == H2_SETTINGS || kind == H2_PING || kind == H2_GOAWAY;
    bool of_stream = kind <= H2_RST_STREAM || kind == H2_CONTINUATION;
    if ((of_connection && stream) || (of_stream && !stream))
        return !fail(event, H2_PROTOCOL_ERROR, H2_WRONG_STREAM);
    return true;
}

// A frame's head is there. True with an event: a fault, or a frame whose payload nobody looks at.
inline bool Http2Reader::begin(Http2Event *event)
{
    left = (uint32_t)head[0] << 16 | (uint32_t)head[1] << 8 | head[2];
    kind = head[3];
    flags = head[4];
    stream = h2_read32(head + 5) & 0x7fffffff;
    have = padding = 0;
    if (!check_place(event))
        return true;
    settled = true;
    bool nobodys = kind > H2_CONTINUATION || kind == H2_GOAWAY;
    uint8_t reason = check_size();
    bool mild = reason == H2_WRONG_SIZE && kind == H2_PRIORITY;     // a fault of its stream (RFC 9113 6.3)
    state = kind == H2_DATA ? DATA : nobodys || mild ? SKIP : GATHER;
    if (reason)
        return fail(event, H2_FRAME_SIZE_ERROR, reason, mild ? stream : 0);
    if ((kind == H2_HEADERS || kind == H2_CONTINUATION) && left > most_block + H2_ROUND_BLOCK)
        return fail(event, H2_ENHANCE_YOUR_CALM, H2_BLOCK_TOO_LONG);
    pad_due = kind == H2_DATA && flags & H2_PADDED;
    begins = true;
    uint8_t named = kind == H2_GOAWAY ? (uint8_t)H2_GOAWAY : (uint8_t)H2_UNKNOWN;
    *event = Http2Event{named, flags, H2_FINE, true, stream, nullptr, 0, 0};
    return nobodys;
}

inline bool Http2Reader::take_data(Http2Event *event)
{
    uint32_t counted = 0;
    if (pad_due) {
        padding = *at++;
        left--;
        counted++;
        pad_due = false;
        if (padding > left)
            return fail(event, H2_PROTOCOL_ERROR, H2_BAD_PADDING);
    }
    const uint8_t *payload = at;
    uint32_t size = pass(left - padding);
    left -= size;
    if (left == padding) {
        uint32_t dropped = pass(padding);
        left -= dropped;
        padding -= dropped;
        counted += dropped;
    }
    uint8_t ends = left ? 0 : flags & H2_END_STREAM;
    *event = Http2Event{H2_DATA, ends, H2_FINE, begins, stream, payload, size, counted + size};
    begins = false;
    if (!left)
        state = HEADER;
    return true;
}

// Cuts padding and priority off a HEADERS frame.
inline bool Http2Reader::take_headers(Http2Event *event, const uint8_t *payload, uint32_t size)
{
    uint32_t round = flags & H2_PADDED ? 1 : 0, pad = 0;
    if (round && size)
        pad = payload[0];
    uint32_t parent_at = round;
    if (flags & H2_WITH_PRIORITY)
        round += 5;
    if (round > size)
        return fail(event, H2_FRAME_SIZE_ERROR, H2_WRONG_SIZE);
    if (round + pad > size)
        return fail(event, H2_PROTOCOL_ERROR, H2_BAD_PADDING);
    own_parent = flags & H2_WITH_PRIORITY && (h2_read32(payload + parent_at) & 0x7fffffff) == stream;
    block_flags = flags & H2_END_STREAM;
    parts = 0;
    return take_part(event, payload + round, size - round - pad);
}

// A piece of a header block, which may be all of it.
inline bool Http2Reader::take_part(Http2Event *event, const uint8_t *payload, uint32_t size)
{
    if (block.size() + size > most_block)
        return fail(event, H2_ENHANCE_YOUR_CALM, H2_BLOCK_TOO_LONG);
    if (parts++ > most_parts)
        return fail(event, H2_ENHANCE_YOUR_CALM, H2_TOO_MANY_PARTS);
    bool whole = flags & H2_END_HEADERS;
    continued = whole ? 0 : stream;
    if (!whole || !block.empty()) {
        block.insert(block.end(), payload, payload + size);
        payload = block.data();
        size = (uint32_t)block.size();
    }
    uint8_t reason = own_parent ? H2_OWN_PARENT : H2_FINE;
    *event = Http2Event{H2_HEADERS, block_flags, reason, true, stream, payload, size, 0};
    spent = whole;
    return whole;
}

// RST_STREAM and WINDOW_UPDATE: one number.
inline bool Http2Reader::take_number(Http2Event *event, const uint8_t *payload)
{
    uint32_t value = h2_read32(payload);
    if (kind == H2_WINDOW_UPDATE) {
        value &= 0x7fffffff;
        if (!value)
            return fail(event, H2_PROTOCOL_ERROR, H2_NO_INCREMENT, stream);
    }
    *event = Http2Event{kind, flags, H2_FINE, true, stream, nullptr, 0, value};
    return true;
}

inline bool Http2Reader::take_whole(Http2Event *event, const uint8_t *payload, uint32_t size)
{
    spent = true;
    switch (kind) {
    case H2_HEADERS:
        return take_headers(event, payload, size);
    case H2_CONTINUATION:
        return take_part(event, payload, size);
    case H2_RST_STREAM:
    case H2_WINDOW_UPDATE:
        return take_number(event, payload);
    case H2_PRIORITY:
        if ((h2_read32(payload) & 0x7fffffff) == stream)
            return fail(event, H2_PROTOCOL_ERROR, H2_OWN_PARENT, stream);
    }
    *event = Http2Event{kind, flags, H2_FINE, true, stream, payload, size, 0};
    return true;
}

// More of a frame that is handed on whole. True with an event.
inline bool Http2Reader::gather(Http2Event *event)
{
    const uint8_t *payload = at;
    uint32_t size = pass(left);
    left -= size;
    if (left || !held.empty()) {
        held.insert(held.end(), payload, payload + size);
        payload = held.data();
        size = (uint32_t)held.size();
    }
    if (left)
        return false;
    state = HEADER;
    bool taken = take_whole(event, payload, size);
    if (!taken)
        h2_drop(&held);         // a part of a header block, copied
    return taken;
}

// The next event of the input; false when it is used up.
inline bool Http2Reader::step(Http2Event *event)
{
    if (spent) {
        h2_drop(&held);
        h2_drop(&block);
        spent = false;
    }
    for (;;) {
        switch (state) {
        case PREFACE: {
            bool whole = gather_head(H2_PREFACE_BYTES);
            if (memcmp(head, H2_PREFACE, have))
                return fail(event, H2_PROTOCOL_ERROR, H2_BAD_PREFACE);
            if (!whole)
                return false;
            have = 0;
            state = HEADER;
            break;
        }
        case HEADER:
            if (at == end || !gather_head(9))
                return false;
            if (begin(event))
                return true;
            break;
        case DATA:
            return (left == 0 || at != end) && take_data(event);
        case GATHER:
            if (left && at == end)
                return false;
            if (gather(event))
                return true;
            break;
        case SKIP:
            left -= pass(left);
            if (left)
                return false;
            state = HEADER;
            break;
        default:
            return false;
        }
    }
}

// The body of a request whose HEADERS were the last event, when it is one whole DATA frame that comes next.
inline bool Http2Reader::take_body(const Http2Event *headers, Http2Event *body)
{
    if (state != HEADER || have || end - at < 9 || at[3] != H2_DATA || at[4] != H2_END_STREAM)
        return false;
    uint32_t size = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
    if ((h2_read32(at + 5) & 0x7fffffff) != headers->stream || size > most_frame || end - at - 9 < (int64_t)size)
        return false;
    *body = Http2Event{H2_DATA, H2_END_STREAM, H2_FINE, true, headers->stream, at + 9, size, size};
    at += 9 + size;
    return true;
}
