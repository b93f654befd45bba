// The shared file of numbers behind /metrics, and the verbs on one number.
//
//   file     [ MetricFile | section 0 | section 1 | ... ]         one section per front process
//   section  [ MetricSection | MetricSeries x series_max | text x text_max | uint64 x slots_max ]
//
// Only the section's own process appends to it; anyone may read any section at any time without a
// lock. A series is written first and counted afterwards (release), so a reader that sees the count
// (acquire) sees the series, and a process that dies in between leaves nothing half made. Nothing is
// ever taken back: a counter must not go down because its process died.
//
// Readers trust no length and no offset of a section: metric_series_at() checks each one.
#pragma once
#include <stdint.h>
#include <string.h>

enum : uint64_t { METRIC_MAGIC = 0x31726574656d7366ull };  // "fsmeter1"
enum : uint32_t { METRIC_SLOTS_EACH_MAX = 36, METRIC_BOUNDS_MAX = 34, METRIC_SIZE_MAX = 1u << 24 };
enum MetricKind : uint32_t { METRIC_NONE = 0, METRIC_COUNTER, METRIC_GAUGE_SUM, METRIC_GAUGE_LAST, METRIC_HISTOGRAM, METRIC_KINDS };

struct MetricFile {            // 64 bytes
    uint64_t magic;
    uint32_t sections, series_max, text_max, slots_max;
    uint64_t spare[5];
};

struct MetricSection {         // 64 bytes: a cache line of its own
    uint32_t series;          // how many series are complete
    uint32_t spare32;
    uint64_t overflow;        // series that found no room
    uint64_t spare[6];
};

struct MetricSeries {          // 32 bytes; offsets are within the section's text and slot areas
    uint32_t kind, text_at, text_bytes, slot_at, slot_count;
    uint32_t spare[3];
};

struct MetricView {            // one section as this process addresses it; built from sizes already checked
    MetricSection *head;
    MetricSeries *series;
    char *text;
    uint64_t *slots;
    uint32_t series_max, text_max, slots_max;
};

static inline uint64_t metric_section_bytes(uint64_t series_max, uint64_t text_max, uint64_t slots_max)
{
    uint64_t bytes = sizeof(MetricSection) + series_max * sizeof(MetricSeries) + ((text_max + 63) & ~63ull) + slots_max * 8;
    return (bytes + 4095) & ~4095ull;                 // sections share no page, so no cache line either
}

static inline MetricView metric_view(char *base, uint64_t index, uint32_t series_max, uint32_t text_max, uint32_t slots_max)
{
    char *at = base + sizeof(MetricFile) + index * metric_section_bytes(series_max, text_max, slots_max);
    MetricView view;
    view.head = (MetricSection *)at;
    view.series = (MetricSeries *)(at + sizeof(MetricSection));
    view.text = (char *)(view.series + series_max);
    view.slots = (uint64_t *)(view.text + ((text_max + 63) & ~63u));
    view.series_max = series_max;
    view.text_max = text_max;
    view.slots_max = slots_max;
    return view;
}

static inline uint32_t metric_count(const MetricView *view)
{
    uint32_t count = __atomic_load_n(&view->head->series, __ATOMIC_ACQUIRE);
    return count < view->series_max ? count : view->series_max;
}

// A checked copy of one entry: false when any of its words points outside the section.
static inline bool metric_series_at(const MetricView *view, uint32_t index, MetricSeries *out)
{
    if (index >= metric_count(view)) return false;
    memcpy(out, &view->series[index], sizeof *out);    // copied once, so that what is checked is what is used
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return out->kind > METRIC_NONE && out->kind < METRIC_KINDS
        && (uint64_t)out->text_at + out->text_bytes <= view->text_max
        && (uint64_t)out->slot_at + out->slot_count <= view->slots_max
        && out->slot_count >= 1 && out->slot_count <= METRIC_SLOTS_EACH_MAX;
}

[[maybe_unused]] static uint64_t METRIC_NOWHERE[METRIC_SLOTS_EACH_MAX];  // what a series without room counts into; nobody reads it

static inline uint64_t metric_load(const uint64_t *slot) { return __atomic_load_n(slot, __ATOMIC_RELAXED); }
static inline void metric_store(uint64_t *slot, uint64_t value) { __atomic_store_n(slot, value, __ATOMIC_RELAXED); }
static inline void metric_add(uint64_t *slot, uint64_t n) { __atomic_fetch_add(slot, n, __ATOMIC_RELAXED); }
static inline uint64_t metric_take(uint64_t *slot) { return __atomic_fetch_add(slot, 1, __ATOMIC_RELAXED); }

// Doubles are loaded, stored and added in one order for all processes: of two that each add to their own and then read
// both, one at least sees both (the limits of keys; an x86 does that at no cost).
static inline double metric_load_double(const uint64_t *slot)
{
    uint64_t bits = __atomic_load_n(slot, __ATOMIC_SEQ_CST);
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

static inline void metric_store_double(uint64_t *slot, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    metric_store(slot, bits);
}

static inline void metric_add_double(uint64_t *slot, double amount)
{
    uint64_t seen = metric_load(slot), wanted;
    do {
        double value;
        memcpy(&value, &seen, 8);
        value += amount;
        memcpy(&wanted, &value, 8);
    } while (!__atomic_compare_exchange_n(slot, &seen, wanted, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
}

// Histogram: slots[0 .. bounds] count the buckets (the last one is +Inf), slots[bounds + 1] is the sum.
static inline void metric_observe(uint64_t *slots, const double *bounds, uint32_t count, double value)
{
    uint32_t bucket = 0;
    for (uint32_t i = 0; i < count; i++) bucket += value > bounds[i];   // no branches: vectorised
    metric_add(slots + bucket, 1);
    metric_add_double(slots + count + 1, value);
}

// The numbers of an instrument, for compiled code that holds its object: a call of a method costs 200 instructions.
#define METRIC_VALUES "fastserve.metric_values"
typedef struct {
    uint64_t *slots;
    const double *bounds;       // of a histogram
    uint32_t count;             // of bounds
} MetricValues;

static inline void metric_observe_ns(const MetricValues *values, int64_t ns)
{
    metric_observe(values->slots, values->bounds, values->count, (double)ns * 1e-9);
}
