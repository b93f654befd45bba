// The rest of a body that waits in the socket, read by one call into its places, with the heads of its DATA frames
// beside them. Where heads lie is a guess: all frames have the size that clients fill, and the last one ends the
// stream. What is another way from some head on is given back as it came ("odd"), for the reader of frames.
//
//     wire     rest of a frame | 9 | 16384 | 9 | 16384 | ... | 9 | the rest
//     places   ^^^^^^^^^^^^^^^       ^^^^^       ^^^^^             ^^^^^^^^
#pragma once
#include <errno.h>
#include <sys/uio.h>
#include <vector>

#include "http2_frames.h"

static constexpr uint32_t H2_HEAD_BYTES = 9;
static constexpr size_t H2_MOST_PARTS = 1024;           // IOV_MAX of Linux

struct Http2Arrived {
    Http2Reader *reader;
    uint32_t stream;
    std::vector<iovec> places;
    std::vector<uint8_t> heads, odd;
    std::vector<iovec> parts;
    int64_t begun = 0;          // payload bytes of the frame that has begun
    uint32_t frames = 0;        // those after it

    bool plan(int64_t rest);
    int64_t receive(int file, int64_t rest);

private:
    bool matches(const uint8_t *head, uint32_t size, bool last) const;
    void add(size_t *place, size_t *used, int64_t size);
    void keep(int64_t offset, int64_t size);
};

// Whether `rest` bytes may come as guessed, by what the reader has seen of them.
inline bool Http2Arrived::plan(int64_t rest)
{
    const Http2Reader *r = reader;
    bool between = r->state == Http2Reader::HEADER && !r->have && !r->continued;
    bool within = r->state == Http2Reader::DATA && r->stream == stream && r->left && !r->padding && !r->pad_due;
    if (rest <= 0 || (!between && !within))
        return false;
    begun = within ? r->left : 0;
    if (begun > rest || (within && (r->flags & H2_END_STREAM) != (begun == rest ? H2_END_STREAM : 0)))
        return false;
    frames = (uint32_t)((rest - begun + r->most_frame - 1) / r->most_frame);
    return 2 * (frames + 1) <= H2_MOST_PARTS;
}

inline bool Http2Arrived::matches(const uint8_t *head, uint32_t size, bool last) const
{
    uint32_t length = (uint32_t)head[0] << 16 | (uint32_t)head[1] << 8 | head[2];
    uint8_t flags = head[4] & (H2_END_STREAM | H2_PADDED);
    return length == size && head[3] == H2_DATA && flags == (last ? H2_END_STREAM : 0)
        && (h2_read32(head + 5) & 0x7fffffff) == stream;
}

// The next `size` bytes of the places.
inline void Http2Arrived::add(size_t *place, size_t *used, int64_t size)
{
    while (size) {
        const iovec &at = places[*place];
        if (*used == at.iov_len) {
            ++*place;
            *used = 0;
            continue;
        }
        size_t some = at.iov_len - *used < (uint64_t)size ? at.iov_len - *used : (size_t)size;
        parts.push_back(iovec{(uint8_t *)at.iov_base + *used, some});
        *used += some;
        size -= some;
    }
}

// Bytes of the places from `offset` on are no payload of the body.
inline void Http2Arrived::keep(int64_t offset, int64_t size)
{
    for (const iovec &at : places) {
        int64_t have = (int64_t)at.iov_len, some = offset < have ? have - offset : 0;
        some = some < size ? some : size;
        if (some > 0) {
            const uint8_t *from = (const uint8_t *)at.iov_base + offset;
            odd.insert(odd.end(), from, from + some);
            size -= some;
        }
        offset = offset < have ? 0 : offset - have;
    }
}

// Reads `rest` bytes, which is the size of the places, after `plan`. Returns how many of them lie in place; the reader goes on behind
// these, with `odd` as the next input. -1: there are too many parts.
inline int64_t Http2Arrived::receive(int file, int64_t rest)
{
    size_t place = 0, used = 0;
    int64_t left = rest - begun;
    heads.resize((size_t)frames * H2_HEAD_BYTES);
    add(&place, &used, begun);
    for (uint32_t i = 0; i < frames; i++) {
        int64_t size = left < reader->most_frame ? left : reader->most_frame;
        parts.push_back(iovec{&heads[(size_t)i * H2_HEAD_BYTES], H2_HEAD_BYTES});
        add(&place, &used, size);
        left -= size;
    }
    if (parts.size() > H2_MOST_PARTS)
        return -1;
    ssize_t got;
    do
        got = readv(file, parts.data(), (int)parts.size());
    while (got < 0 && errno == EINTR);
    if (got <= 0)
        return 0;
    int64_t placed = got < begun ? got : begun;
    got -= placed;
    if (begun) {
        reader->left -= (uint32_t)placed;
        reader->begins = false;
        if (!reader->left)
            reader->state = Http2Reader::HEADER;
    }
    left = rest - begun;
    for (uint32_t i = 0; i < frames && got; i++) {
        uint32_t size = left < reader->most_frame ? (uint32_t)left : reader->most_frame;
        const uint8_t *head = &heads[(size_t)i * H2_HEAD_BYTES];
        if (got < H2_HEAD_BYTES || !matches(head, size, i + 1 == frames)) {
            int64_t offset = placed;
            for (; got; i++) {
                size = left < reader->most_frame ? (uint32_t)left : reader->most_frame;
                int64_t some = got < H2_HEAD_BYTES ? got : H2_HEAD_BYTES;
                head = &heads[(size_t)i * H2_HEAD_BYTES];
                odd.insert(odd.end(), head, head + some);
                got -= some;
                some = got < size ? got : size;
                keep(offset, some);
                offset += some;
                got -= some;
                left -= size;
            }
            break;
        }
        got -= H2_HEAD_BYTES;
        uint32_t some = got < size ? (uint32_t)got : size;
        placed += some;
        got -= some;
        left -= size;
        if (some < size) {
            reader->state = Http2Reader::DATA;
            reader->kind = H2_DATA;
            reader->flags = head[4];
            reader->stream = stream;
            reader->left = size - some;
            reader->padding = 0;
            reader->pad_due = false;
            reader->begins = !some;
        }
    }
    return placed;
}
