// Norms of rows, and attention of one token for each sequence: a decoding step computes them between its products.
//
//   attend: keys and values of the new token -> cache, at its position
//           scores of the query with the keys up to it -> softmax -> sum of the values
//
// A sequence reads its own positions alone, in order: its result has the same bits beside any others.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "omp_threads.h"
#include "sampling.h"

namespace decoding {

static inline float add_up(float *part)
{
    for (int wide = LANES / 2; wide; wide /= 2)
        for (int l = 0; l < wide; l++)
            part[l] += part[l + wide];
    return part[0];
}

static inline float dot(const float *a, const float *b, int64_t count)
{
    float part[LANES] = {0};
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (int l = 0; l < LANES; l++)
            part[l] += a[at + l] * b[at + l];
    for (int l = 0; at < count; at++, l++)
        part[l] += a[at] * b[at];
    return add_up(part);
}

FOR_EACH_ISA static void rms_norm(
    const float *rows, const float *weight, float *out, int64_t count, int64_t width, float eps)
{
    for (int64_t row = 0; row < count; row++, rows += width, out += width) {
        const float scale = 1.0f / std::sqrt(dot(rows, rows, width) / (float)width + eps);
        for (int64_t at = 0; at < width; at++)
            out[at] = rows[at] * scale * weight[at];
    }
}

struct Attention {
    const float *query, *key, *value;          // [rows, heads or key heads, dim], so many floats from row to row:
    int64_t query_row, key_row, value_row, query_head, key_head, value_head;
    float *keys, *values;                      // [slots, key heads, room, dim], of which a row has its own slot
    const int64_t *positions;
    float *out;                                // [rows, heads, dim]
    int64_t rows, key_heads, share, dim, room, window; // share: the heads of each key head
    float scale;
};

constexpr int64_t PART = 64; // of a sum of values, that stays in registers

// Sum of weights times values, PART dimensions at a time.
static inline void add_values(const float *weights, const float *values, int64_t count, int64_t dim, float *out)
{
    int64_t at = 0;
    for (; at + PART <= dim; at += PART) {
        float sums[PART] = {0};
        for (int64_t place = 0; place < count; place++)
            for (int64_t d = 0; d < PART; d++)
                sums[d] += weights[place] * values[place * dim + at + d];
        std::memcpy(out + at, sums, sizeof sums);
    }
    if (at == dim)
        return;
    float sums[PART] = {0};
    for (int64_t place = 0; place < count; place++)
        for (int64_t d = at; d < dim; d++)
            sums[d - at] += weights[place] * values[place * dim + d];
    std::memcpy(out + at, sums, (size_t)(dim - at) * sizeof(float));
}

// One key head of one row. `scores`: room for a position's each.
FOR_EACH_ISA static void attend_head(const Attention &task, int64_t row, int64_t head, float *scores)
{
    const int64_t dim = task.dim, at = task.positions[row], cell = (row * task.key_heads + head) * task.room * dim;
    float *keys = task.keys + cell, *values = task.values + cell;
    std::memcpy(keys + at * dim, task.key + row * task.key_row + head * task.key_head, (size_t)dim * sizeof(float));
    std::memcpy(values + at * dim, task.value + row * task.value_row + head * task.value_head, (size_t)dim * sizeof(float));
    const int64_t first = at + 1 > task.window ? at + 1 - task.window : 0, count = at + 1 - first;
    for (int64_t one = head * task.share; one < (head + 1) * task.share; one++) {
        const float *query = task.query + row * task.query_row + one * task.query_head;
        float most = -std::numeric_limits<float>::infinity();
        for (int64_t place = 0; place < count; place++) {
            scores[place] = dot(query, keys + (first + place) * dim, dim) * task.scale;
            most = scores[place] > most ? scores[place] : most;
        }
        float part[LANES] = {0};
        int64_t place = 0;
        for (; place + LANES <= count; place += LANES)
            for (int l = 0; l < LANES; l++) {
                const float weight = exp_of(scores[place + l] - most);
                scores[place + l] = weight;
                part[l] += weight;
            }
        for (int l = 0; place < count; place++, l++) {
            scores[place] = exp_of(scores[place] - most);
            part[l] += scores[place];
        }
        const float whole = 1.0f / add_up(part);
        float *out = task.out + (row * task.key_heads * task.share + one) * dim;
        add_values(scores, values + first * dim, count, dim, out);
        for (int64_t d = 0; d < dim; d++)
            out[d] *= whole;
    }
}

// Key heads of all rows are shared out; `scores` has room for a row of the cache for each thread.
struct Share {
    const Attention &task;
    float *scores;
};

static void attend_share(const Share &share, int64_t number, int64_t count)
{
    const int64_t all = share.task.rows * share.task.key_heads;
    for (int64_t at = all * number / count; at < all * (number + 1) / count; at++)
        attend_head(share.task, at / share.task.key_heads, at % share.task.key_heads, share.scores + number * share.task.room);
}

static void attend(const Attention &task, int64_t threads)
{
    const bool alone = threads < 2 || !omp_threads::are_there();
    std::vector<float> scores((size_t)((alone ? 1 : threads) * task.room));
    Share share{task, scores.data()};
    if (alone)
        return attend_share(share, 0, 1);
    auto work = [](void *given) { attend_share(*(const Share *)given, omp_threads::number(), omp_threads::count()); };
    omp_threads::parallel(work, &share, (unsigned)threads, 0);
}

} // namespace decoding
