// Depth-first search over all orders of the steps of all actors; a state that was seen before is not searched again.
//
//     stepper slots=3 max_rows=2 requests0=1 ... states=1000000
//
// A state is the shared memory, and of each actor what it has read since its last boundary. An actor is a
// coroutine on a stack of its own; a step is turned back by its log of writes and a copy of that stack.
#include "stepper.h"
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <ucontext.h>
#include <vector>

Scenario scenario = {2, 2, {1, 1}, {1, 1}, {0, 0}, 0, 0, 0, 8};

namespace {
enum Status : uint8_t { UNBORN, GOES, OVER, DEAD };
const char *const NAMES[ACTORS] = {"first", "second", "worker", "owner"};
constexpr size_t STACK_BYTES = 64 << 10, BELOW_FRAME = 512, PATH_STEPS = 2000;

struct Standing {       // of an actor, apart from its stack
    uint64_t history;
    Status status;
    Wait wait;
    bool writes;        // its next step does
    bool inner;         // it may die here, and nobody else comes in between
    char *low;
};
struct Written { uint64_t *at, was; };

alignas(64) char stacks[ACTORS][STACK_BYTES];
Standing standing[ACTORS];
jmp_buf places[ACTORS], search_place;
ucontext_t birth;
int current = -1, quiet = 0, dead = -1;
std::vector<Written> writes;
std::vector<std::pair<int, const void *>> path;    // whose step, and where it went
uint64_t transitions, states_most = 1u << 30, ends, deepest, memory_key;
bool complete = true, every_access = false, whole_stacks = false;
uint32_t switches_most = 1u << 30;      // away from an actor that could go on

// Not symmetric: numbers of small values, such as a place and a slot, would meet in a sum of the two.
uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t z = (a * 0xd6e8feb86659fd93u + b) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 32) * 0xbf58476d1ce4e5b9u;
    return z ^ z >> 29;
}

// Open addressing; a key is never 0.
struct Seen {
    std::vector<uint64_t> table = std::vector<uint64_t>(1 << 16);
    size_t count = 0;

    bool add(uint64_t key)
    {
        key |= 1;
        if (2 * ++count > table.size())
            grow();
        size_t at = find(key);
        if (table[at] == key) {
            count--;
            return false;
        }
        table[at] = key;
        return true;
    }

    size_t find(uint64_t key) const
    {
        size_t at = (key >> 1) & (table.size() - 1);
        while (table[at] && table[at] != key)
            at = (at + 1) & (table.size() - 1);
        return at;
    }

    void grow()
    {
        std::vector<uint64_t> old(2 * table.size());
        old.swap(table);
        for (uint64_t key : old)
            if (key)
                table[find(key)] = key;
    }
} seen;

bool within(Range range, const void *at)
{
    return at >= range.at && at < (char *)range.at + range.bytes;
}

void log_write(void *at, size_t bytes)
{
    if (!within(world_memory(), at))
        return;
    uint64_t *word = (uint64_t *)((uintptr_t)at & ~(uintptr_t)7);
    for (; (char *)word < (char *)at + bytes; word++)
        writes.push_back({word, *word});
}

uint64_t word_key(const uint64_t *at, uint64_t value)
{
    bool shared = within(shared_memory(), at);
    return shared && is_quiet(at) ? 0 : mix((uintptr_t)at - (uintptr_t)world_memory().at + 1, value);
}

// What was written since the log had `from` entries.
void update_key(size_t from)
{
    for (size_t i = from; i < writes.size(); i++) {
        bool first = true;
        for (size_t j = from; j < i; j++)
            first = first && writes[j].at != writes[i].at;
        if (first)
            memory_key += word_key(writes[i].at, *writes[i].at) - word_key(writes[i].at, writes[i].was);
    }
}

void know(uint64_t what) { standing[current].history = mix(standing[current].history, what); }

// The actor stops before its next step; the search lets it go on.
__attribute__((noinline)) void stop(bool writes, bool inner = false)
{
    standing[current].writes = writes, standing[current].inner = inner;
    standing[current].low = (char *)__builtin_frame_address(0) - BELOW_FRAME;
    if (standing[current].low < stacks[current])
        violated("an actor's stack is too small");
    if (!_setjmp(places[current]))
        _longjmp(search_place, 1);
    standing[current].inner = false;
}

bool is_step(const void *at)
{
    return current >= 0 && !quiet && within(shared_memory(), at) && !is_quiet(at);
}

void touch(const void *at, size_t bytes, bool write)
{
    if (is_step(at) && (every_access || (write && dead < 0 && scenario.deaths >> current & 1))) {
        stop(write, !every_access);
        path.back().second = at;
    }
    if (is_step(at)) {
        uint64_t value = 0;
        for (size_t i = 0; !write && i < bytes; i += 8) {
            memcpy(&value, (const char *)at + i, std::min<size_t>(8, bytes - i));
            know(value);
        }
        know((uintptr_t)at - (uintptr_t)shared_memory().at);
    }
    if (write && current >= 0)
        log_write((void *)at, bytes);
}

template <class T, class Do> T atomic(const volatile void *at, bool write, Do change)
{
    T *place = (T *)at;
    bool step = is_step(place);
    if (step) {
        stop(write);
        path.back().second = place;
    }
    if (write && current >= 0)
        log_write(place, sizeof(T));
    T was = *place;
    if (write)
        change(place);
    if (step)
        know(mix((uint64_t)was + 1, (uintptr_t)at - (uintptr_t)shared_memory().at));
    return was;
}

// --- search --------------------------------------------------------------------------------------
void born()
{
    run_actor(current);
    standing[current].status = OVER;
    _longjmp(search_place, 1);
}

// Let an actor do its next step, and go as far as the one behind it.
void resume(int actor)
{
    current = actor;
    if (!_setjmp(search_place)) {
        if (standing[actor].status == GOES)
            _longjmp(places[actor], 1);
        standing[actor].status = GOES;
        getcontext(&birth);
        birth.uc_stack.ss_sp = stacks[actor];
        birth.uc_stack.ss_size = STACK_BYTES;
        makecontext(&birth, born, 0);
        setcontext(&birth);
    }
    current = -1;
}

uint64_t key_now(int last, uint32_t switches)
{
    uint64_t key = switches_most >> 30 ? memory_key : mix(memory_key, (uint64_t)switches << 8 | (last + 1));
    for (int i = 0; i < ACTORS; i++) {
        uint64_t flags = (uint64_t)standing[i].status << 16 | (uint64_t)standing[i].inner << 8 | standing[i].wait;
        uint64_t known = standing[i].history;
        if (whole_stacks && standing[i].status == GOES) {
            known = 0;
            const char *place = (const char *)&places[i], *frame = standing[i].low + BELOW_FRAME;
            for (size_t at = 0; at < 64; at += 8)       // the registers
                known = mix(known + at, *(const uint64_t *)(place + at));
            for (; frame < stacks[i] + STACK_BYTES; frame += 8)
                known = mix(known + 3, *(const uint64_t *)frame);
        }
        key = mix(key + i, mix(known, flags));
    }
    return mix(key, dead + 1);
}

bool can_go(int actor)
{
    const Standing &it = standing[actor];
    return (it.status == UNBORN || it.status == GOES) && (it.wait == NOTHING || is_ready(actor, it.wait));
}

struct Before {         // a step
    Standing standing[ACTORS];
    jmp_buf place;
    std::vector<char> stack;
    size_t writes;
    uint64_t memory_key;
    int dead;

    explicit Before(int actor) : writes(::writes.size()), memory_key(::memory_key), dead(::dead)
    {
        memcpy(standing, ::standing, sizeof standing);
        if (standing[actor].status == GOES) {
            memcpy(&place, &places[actor], sizeof place);
            stack.assign(standing[actor].low, stacks[actor] + STACK_BYTES);
        }
    }

    void turn_back(int actor)
    {
        while (::writes.size() > writes) {
            *::writes.back().at = ::writes.back().was;
            ::writes.pop_back();
        }
        ::memory_key = memory_key;
        memcpy(::standing, standing, sizeof standing);
        ::dead = dead;
        if (standing[actor].status == GOES) {
            memcpy(&places[actor], &place, sizeof place);
            std::copy(stack.begin(), stack.end(), standing[actor].low);
        }
    }
};

// `last` took the last step, and so many times another did where it could have gone on.
void search(int last, uint32_t switches)
{
    if (seen.count >= states_most) {
        complete = false;
        return;
    }
    if (!seen.add(key_now(last, switches)))
        return;
    deepest = std::max<uint64_t>(deepest, path.size());
    if (path.size() > PATH_STEPS)
        violated("the steps never end");
    bool moved = false;
    int inner = -1;
    for (int actor = 0; actor < ACTORS; actor++)
        inner = standing[actor].status == GOES && standing[actor].inner ? actor : inner;
    bool may_go_on = last >= 0 && can_go(last);
    for (int actor = 0; actor < ACTORS; actor++) {
        if (!can_go(actor) || (inner >= 0 && inner != actor))
            continue;
        moved = moved || actor != OWNER || dead >= 0;
        uint32_t made = switches + (may_go_on && actor != last);
        if (made > switches_most)
            continue;
        Before before(actor);
        path.push_back({actor, nullptr});
        transitions++;
        resume(actor);
        update_key(before.writes);
        search(actor, made);
        path.pop_back();
        before.turn_back(actor);
    }
    // A death before a read leaves what a death after it does.
    for (int actor = 0; actor < ACTORS && dead < 0; actor++) {
        if (!(scenario.deaths >> actor & 1) || standing[actor].status != GOES || !standing[actor].writes || (inner >= 0 && inner != actor))
            continue;
        Before before(actor);     // its place may be another's before the search comes back
        path.push_back({-1 - actor, nullptr});
        transitions++;
        dead = actor;
        standing[actor] = {0, DEAD, NOTHING, false, false, nullptr};
        current = OWNER, quiet++;
        died(actor);
        current = -1, quiet--;
        update_key(before.writes);
        search(actor == last ? -1 : last, switches);
        path.pop_back();
        before.turn_back(actor);
    }
    if (!moved) {
        ends++;
        check_end();
    }
}

void say(const char *found)
{
    printf("{\"found\": \"%s\", \"states\": %zu, \"transitions\": %lu, \"ends\": %lu, \"deepest\": %lu, \"complete\": %s}\n", found,
           seen.count, transitions, ends, deepest, complete ? "true" : "false");
}
}  // namespace

void violated(const char *what)
{
    say(what);
    int before = ACTORS;
    for (auto [actor, at] : path) {
        if (actor < 0)
            printf("\n%s DIES", NAMES[-1 - actor]);
        else if (actor != before)
            printf("\n%s:", NAMES[actor]);
        if (at)
            printf(" %s", place_of(at));
        before = actor;
    }
    printf("\n");
    fflush(stdout);
    _Exit(1);
}

Quiet::Quiet() { quiet++; }
Quiet::~Quiet() { quiet--; }

void boundary(int place, uint64_t a, uint64_t b, uint64_t c)
{
    standing[current].history = mix(mix(mix(mix(place + 1, a), b), c), 77);
}

void wait_until(Wait what)
{
    standing[current].wait = what;
    stop(true);
    standing[current].wait = NOTHING;
    know(what);
}

void spawn(int actor) { standing[actor] = {(uint64_t)1 << 63, UNBORN, NOTHING, false, false, nullptr}; }

int dead_actor() { return dead; }

uint32_t moving()
{
    uint32_t found = 0;
    for (int actor = 0; actor < ACTORS; actor++)
        found |= (uint32_t)(standing[actor].status == GOES && standing[actor].wait == NOTHING) << actor;
    return found;
}

// --- what the compiler calls for each access -----------------------------------------------------
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_read_range(void *at, unsigned long bytes) { touch(at, bytes, false); }
void __tsan_write_range(void *at, unsigned long bytes) { touch(at, bytes, true); }
#define PLAIN(bytes) \
    void __tsan_read##bytes(void *at) { touch(at, bytes, false); } \
    void __tsan_write##bytes(void *at) { touch(at, bytes, true); } \
    void __tsan_unaligned_read##bytes(void *at) { touch(at, bytes, false); } \
    void __tsan_unaligned_write##bytes(void *at) { touch(at, bytes, true); }
PLAIN(1) PLAIN(2) PLAIN(4) PLAIN(8) PLAIN(16)

#define ATOMIC(bits, T) \
    T __tsan_atomic##bits##_load(const volatile T *at, int) { return atomic<T>(at, false, [](T *) {}); } \
    void __tsan_atomic##bits##_store(volatile T *at, T value, int) { atomic<T>(at, true, [=](T *it) { *it = value; }); } \
    T __tsan_atomic##bits##_exchange(volatile T *at, T value, int) { return atomic<T>(at, true, [=](T *it) { *it = value; }); } \
    T __tsan_atomic##bits##_fetch_add(volatile T *at, T value, int) { return atomic<T>(at, true, [=](T *it) { *it += value; }); } \
    T __tsan_atomic##bits##_fetch_sub(volatile T *at, T value, int) { return atomic<T>(at, true, [=](T *it) { *it -= value; }); } \
    T __tsan_atomic##bits##_fetch_or(volatile T *at, T value, int) { return atomic<T>(at, true, [=](T *it) { *it |= value; }); } \
    bool __tsan_atomic##bits##_compare_exchange_strong(volatile T *at, T *expected, T wanted, int, int) \
    { \
        T if_so = *expected; \
        T was = atomic<T>(at, true, [=](T *it) { if (*it == if_so) *it = wanted; }); \
        *expected = was; \
        return was == if_so; \
    } \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T *at, T expected, T wanted, int, int) \
    { \
        __tsan_atomic##bits##_compare_exchange_strong(at, &expected, wanted, 0, 0); \
        return expected; \
    }
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)
void __tsan_atomic_thread_fence(int) {}

// A clear or copy of memory is one step: whoever looks at it meanwhile has no right to, and is found by its reads.
void *stepped_memset(void *at, int value, size_t bytes)
{
    touch(at, bytes, true);
    return memset(at, value, bytes);
}
}

int main(int count, char **words)
{
    const std::vector<std::pair<std::string, uint32_t *>> numbers = {
        {"slots", &scenario.slots}, {"max_rows", &scenario.max_rows}, {"rows0", &scenario.rows[0]}, {"rows1", &scenario.rows[1]},
        {"requests0", &scenario.requests[0]}, {"requests1", &scenario.requests[1]}, {"gives_up0", &scenario.gives_up[0]},
        {"gives_up1", &scenario.gives_up[1]}, {"deaths", &scenario.deaths}, {"reborn", &scenario.reborn}, {"words", &scenario.words}, {"looks", &scenario.looks},
    };
    for (int i = 1; i < count; i++) {
        std::string word = words[i], name = word.substr(0, word.find('='));
        uint64_t value = strtoull(word.c_str() + name.size() + 1, nullptr, 10);
        auto found = std::find_if(numbers.begin(), numbers.end(), [&](auto &one) { return one.first == name; });
        if (name == "states")
            states_most = value;
        else if (name == "switches")
            switches_most = (uint32_t)value;
        else if (name == "whole_stacks")
            whole_stacks = value;
        else if (name == "every_access")
            every_access = value;
        else if (found != numbers.end())
            *found->second = (uint32_t)value;
        else
            return fprintf(stderr, "no such word: %s\n", words[i]), 2;
    }
    world_begin();
    for (int actor = 0; actor < ACTORS; actor++)
        standing[actor] = {(uint64_t)actor, UNBORN, actor == OWNER ? DEATH : NOTHING, false, false, nullptr};
    search(-1, 0);
    say("");
    return 0;
}
