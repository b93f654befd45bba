// Drawing the next token from a row of logits: penalties, temperature, top-k, top-p, min-p, typical-p, a seeded uniform.
//
//   logits -> mask (of a copy) -> penalties (undone afterwards) -> weights exp((z - max) / temperature) -> cuts -> one draw
//
// Nothing is sorted. A cut (the best k, the least set that has a share p of the mass) is a place in the order of
// weights, equal ones by lower token first, and is found by partitioning. Which tokens stay is exact; the sums are
// floats over blocks of BLOCK and doubles over those. What is drawn depends on the row, the settings and (seed,
// step) alone, never on who shares the batch.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_ISA
#endif

constexpr int LANES = 16, BLOCK = 256;
constexpr float FIRST = 0.02f;     // the first threshold of candidates
constexpr float SMALLEST = -87.0f; // exp of less is no normal float any more: a weight of nothing

struct Sampling {
    uint64_t seed, step;
    int32_t top_k; // 0: all
    float temperature, top_p, min_p, typical_p, repetition, presence, frequency;
    bool draws; // else the heaviest is taken
    bool masked; // only tokens whose bit is set in a mask can be drawn
};

// What a sequence has said. Tokens of the prompt are seen and counted 0 times.
struct Seen { int32_t token, count; };
struct History {
    std::vector<Seen> seen;
    std::unordered_map<int32_t, uint32_t> place;
    void add(int32_t token, int32_t times)
    {
        auto [at, fresh] = place.try_emplace(token, (uint32_t)seen.size());
        if (fresh)
            seen.push_back({token, 0});
        seen[at->second].count += times;
    }
    void clear() { seen.clear(), place.clear(); }
};

struct Candidate { uint64_t key; float weight; int32_t token; };
struct Workspace {
    std::vector<float> weights, sums, peaks, kept; // kept: logits that penalties have changed
    std::vector<float> allowed; // a row under a mask
    std::vector<Candidate> all, part;
    void fit(size_t vocab)
    {
        size_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
        weights.assign(padded, 0.0f), sums.assign(padded / BLOCK, 0.0f), peaks.assign(padded / BLOCK, 0.0f);
        all.reserve(vocab), part.reserve(vocab);
    }
};

// Between 0 and 1, a function of its arguments: splitmix64 of a counter (Steele, Lea and Flood, 2014).
static inline double uniform(uint64_t seed, uint64_t step)
{
    uint64_t z = seed + (step + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// exp of x <= 0 in floats, within 3e-7 of it; written so that compilers make vectors of it.
static inline float exp_of(float x)
{
    float within = x < SMALLEST ? SMALLEST : x;
    float n = (within * 1.44269504f + 12582912.0f) - 12582912.0f; // rounded to a whole number
    float r = within - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f, y = y * r + 8.3334519073e-3f, y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f, y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y *= std::bit_cast<float>(((int32_t)n + 127) << 23);
    return x < SMALLEST ? 0.0f : y;
}

// The largest; NaN when there is one.
FOR_EACH_ISA static float largest(const float *z, int vocab)
{
    float most[LANES];
    int odd[LANES] = {0};
    std::fill(most, most + LANES, -std::numeric_limits<float>::infinity());
    int j = 0;
    for (; j + LANES <= vocab; j += LANES)
        for (int l = 0; l < LANES; l++) {
            most[l] = z[j + l] > most[l] ? z[j + l] : most[l];
            odd[l] |= z[j + l] != z[j + l];
        }
    for (; j < vocab; j++)
        most[0] = z[j] > most[0] ? z[j] : most[0], odd[0] |= z[j] != z[j];
    bool any = false;
    for (int l = 0; l < LANES; l++)
        any |= odd[l] != 0, most[0] = std::max(most[0], most[l]);
    return any ? std::numeric_limits<float>::quiet_NaN() : most[0];
}

// Weights of one block, its sum and its peak. A block that is not whole ends in zeros.
FOR_EACH_ISA static void weigh(const float *z, int count, float most, float scale, float *w, float *sum, float *peak)
{
    float sums[LANES] = {0}, peaks[LANES] = {0};
    for (int j = 0; j < BLOCK; j++)
        w[j] = j < count ? exp_of((z[j] - most) * scale) : 0.0f;
    for (int j = 0; j < BLOCK; j += LANES)
        for (int l = 0; l < LANES; l++)
            sums[l] += w[j + l], peaks[l] = w[j + l] > peaks[l] ? w[j + l] : peaks[l];
    for (int l = 1; l < LANES; l++)
        sums[0] += sums[l], peaks[0] = std::max(peaks[0], peaks[l]);
    *sum = sums[0], *peak = peaks[0];
}

static inline uint64_t key_of(float value, int32_t token) // heavier first, then the lower token
{
    return (uint64_t)std::bit_cast<uint32_t>(value) << 32 | (0xffffffffu - (uint32_t)token);
}
static inline bool before(const Candidate &a, const Candidate &b) { return a.key > b.key; }

// The key of the last of the least set, in the order of keys, that has a mass of `wanted`.
static uint64_t cut_by_mass(std::vector<Candidate> &all, double wanted)
{
    size_t low = 0, high = all.size();
    double have = 0;
    while (high - low > 32) {
        uint64_t middle = std::max(std::min(all[low].key, all[high - 1].key),
                                   std::min(std::max(all[low].key, all[high - 1].key), all[low + (high - low) / 2].key));
        auto split = std::partition(all.begin() + low, all.begin() + high, [=](const Candidate &c) { return c.key > middle; });
        size_t at = split - all.begin();
        double upper = 0;
        for (size_t i = low; i < at; i++)
            upper += all[i].weight;
        if (at > low && have + upper >= wanted)
            high = at;
        else if (at > low)
            have += upper, low = at;
        else { // nobody is before the pivot: it is the first of what is left
            auto pivot = std::find_if(all.begin() + low, all.begin() + high, [=](const Candidate &c) { return c.key == middle; });
            std::swap(all[low], *pivot);
            have += all[low].weight;
            if (have >= wanted)
                return all[low].key;
            low++;
        }
    }
    std::sort(all.begin() + low, all.begin() + high, before);
    for (size_t i = low; i < high; i++) {
        have += all[i].weight;
        if (have >= wanted || i + 1 == all.size())
            return all[i].key;
    }
    return high ? all[high - 1].key : 0;
}

static uint64_t cut_by_count(std::vector<Candidate> &all, size_t count)
{
    if (count >= all.size())
        return 0;
    std::nth_element(all.begin(), all.begin() + (count - 1), all.end(), before);
    uint64_t last = all[count - 1].key;
    all.resize(count);
    return last;
}

static double mass_of(const std::vector<Candidate> &all)
{
    double sum = 0;
    for (const Candidate &one : all)
        sum += one.weight;
    return sum;
}

// Everything at least as heavy as a threshold, which is lowered until `count` tokens or `mass` are there.
static void gather(Workspace &work, int vocab, size_t count, double mass, float first)
{
    size_t blocks = ((size_t)vocab + BLOCK - 1) / BLOCK;
    for (float least = first;; least = least < 1e-30f ? 0.0f : least * 0.05f) {
        work.all.clear();
        double sum = 0;
        for (size_t b = 0; b < blocks; b++) {
            if (work.peaks[b] < least || work.peaks[b] <= 0.0f)
                continue;
            const float *w = work.weights.data() + b * BLOCK;
            for (int j = 0; j < BLOCK; j++)
                if (w[j] >= least && w[j] > 0.0f) {
                    int32_t token = (int32_t)(b * BLOCK) + j;
                    work.all.push_back({key_of(w[j], token), w[j], token});
                    sum += w[j];
                }
        }
        if (least == 0.0f || (work.all.size() >= count && sum >= mass))
            return;
    }
}

// How far a token's surprise is from what was to be expected; nearest first (Meister et al., 2022).
static uint64_t cut_typical(Workspace &work, double share)
{
    double total = mass_of(work.part), entropy = 0;
    for (const Candidate &one : work.part)
        entropy -= one.weight / total * std::log(one.weight / total);
    for (Candidate &one : work.part)
        one.key = key_of(1.0f / (1.0f + (float)std::fabs(-std::log(one.weight / total) - entropy)), one.token);
    for (Candidate &one : work.all)
        one.key = key_of(1.0f / (1.0f + (float)std::fabs(-std::log(one.weight / total) - entropy)), one.token);
    return cut_by_mass(work.part, share * total);
}

static void keep_from(std::vector<Candidate> &all, uint64_t last)
{
    std::erase_if(all, [=](const Candidate &one) { return one.key < last; });
}

// What is left of the row after the cuts, in the order of tokens.
static void cut(Workspace &work, const Sampling &s, int vocab, double total)
{
    bool counted = s.top_k > 0 && s.top_k < vocab;
    bool whole = s.top_p >= 1.0f || s.typical_p < 1.0f;
    if (s.min_p > 0.0f && s.top_p >= 1.0f && !counted) // nothing before it: the heaviest token weighs 1
        gather(work, vocab, 0, 0, s.min_p);
    else
        gather(work, vocab, counted ? s.top_k : whole ? vocab : 0, counted || whole ? 0 : s.top_p * total, FIRST);
    work.part = work.all;
    if (counted)
        keep_from(work.all, cut_by_count(work.part, s.top_k));
    if (s.top_p < 1.0f) {
        uint64_t last = cut_by_mass(work.part, s.top_p * (counted || whole ? mass_of(work.part) : total));
        keep_from(work.all, last);
        work.part = work.all;
    }
    if (s.min_p > 0.0f) {
        std::erase_if(work.all, [&](const Candidate &one) { return one.weight < s.min_p; });
        work.part = work.all;
    }
    if (s.typical_p < 1.0f)
        keep_from(work.all, cut_typical(work, s.typical_p));
}

static int32_t draw_among(const std::vector<Candidate> &all, double share)
{
    double goal = share * mass_of(all), sum = 0;
    for (const Candidate &one : all)
        if ((sum += one.weight) > goal)
            return one.token;
    return all.back().token;
}

static int32_t draw_anywhere(const Workspace &work, int vocab, double share, double total)
{
    double goal = share * total, sum = 0;
    int32_t last = 0;
    for (int begin = 0; begin < vocab; begin += BLOCK) {
        float block = work.sums[begin / BLOCK];
        if (sum + block <= goal) {
            sum += block;
            continue;
        }
        for (int j = begin; j < std::min(begin + BLOCK, vocab); j++)
            if (work.weights[j] > 0.0f) {
                last = j;
                if ((sum += work.weights[j]) > goal)
                    return j;
            }
    }
    for (int j = vocab - 1; j > last; j--) // sums of blocks and of their tokens differ by a rounding
        if (work.weights[j] > 0.0f)
            return j;
    return last;
}

static void penalise(float *z, const Sampling &s, const History &said, std::vector<float> &kept)
{
    kept.clear();
    for (const Seen &one : said.seen) {
        float value = z[one.token];
        kept.push_back(value);
        value = value > 0.0f ? value / s.repetition : value * s.repetition;
        z[one.token] = value - s.frequency * one.count - (one.count ? s.presence : 0.0f);
    }
}

// The logarithm of the sum of exp.
static double log_sum_exp(const float *z, int vocab, float most)
{
    double sum = 0;
    for (int j = 0; j < vocab; j++)
        sum += std::exp((double)z[j] - most);
    return most + std::log(sum);
}

// The `count` heaviest, heaviest first.
static std::vector<int32_t> heaviest(const float *z, int vocab, int count)
{
    std::vector<int32_t> order(vocab);
    for (int j = 0; j < vocab; j++)
        order[j] = j;
    count = std::min(count, vocab);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [z](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); });
    order.resize(count);
    return order;
}

// A token; -1 for a row that has a NaN, or nothing that could be chosen.
static int32_t draw_row(const float *z, int vocab, const Sampling &s, Workspace &work)
{
    float most = largest(z, vocab);
    if (!std::isfinite(most))
        return -1;
    if (!s.draws)
        return (int32_t)(std::find(z, z + vocab, most) - z);
    double total = 0;
    float scale = 1.0f / s.temperature;
    for (int begin = 0; begin < vocab; begin += BLOCK) {
        int b = begin / BLOCK;
        weigh(z + begin, std::min(BLOCK, vocab - begin), most, scale, work.weights.data() + begin, &work.sums[b], &work.peaks[b]);
        total += work.sums[b];
    }
    double share = uniform(s.seed, s.step);
    if ((s.top_k <= 0 || s.top_k >= vocab) && s.top_p >= 1.0f && s.min_p <= 0.0f && s.typical_p >= 1.0f)
        return draw_anywhere(work, vocab, share, total);
    cut(work, s, vocab, total);
    return draw_among(work.all, share);
}

static int32_t draw_penalised(float *z, int vocab, const Sampling &s, const History &said, Workspace &work)
{
    penalise(z, s, said, work.kept);
    int32_t token = draw_row(z, vocab, s, work);
    for (size_t i = 0; i < said.seen.size(); i++)
        z[said.seen[i].token] = work.kept[i];
    return token;
}

static inline int mask_words(int vocab) { return (vocab + 31) / 32; }

// A copy of a row in which tokens without a bit have no weight. Bit j % 32 of word j / 32 is of token j.
FOR_EACH_ISA static void apply_mask(const float *z, const int32_t *mask, int vocab, float *allowed)
{
    for (int j = 0; j < vocab; j++)
        allowed[j] = (uint32_t)mask[j >> 5] >> (j & 31) & 1 ? z[j] : -std::numeric_limits<float>::infinity();
}
