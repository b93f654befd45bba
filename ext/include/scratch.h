// Memory in which a thread writes texts before their size is known.
//
// A text is then copied into a bytes object that fits, at memory speed. Cutting a generous bytes
// object instead makes malloc map and unmap it every time: 450 page faults for 150528 floats, 3 to
// 5 ns a number where the text itself takes 13.
#pragma once
#include <stdlib.h>

static constexpr size_t SCRATCH_BYTES = 4 << 20;    // the most a thread keeps

struct Scratch {
    char *memory = nullptr;
    size_t bytes = 0;
    ~Scratch() { free(memory); }
};

// NULL when it would be too large; else valid until this thread's next call.
static inline char *take_scratch(size_t bytes)
{
    static thread_local Scratch kept;
    if (__builtin_expect(bytes > kept.bytes, 0)) {
        if (bytes > SCRATCH_BYTES)
            return nullptr;
        size_t room = 16384;
        while (room < bytes)
            room *= 2;
        free(kept.memory);
        kept.memory = (char *)malloc(room);
        kept.bytes = kept.memory ? room : 0;
    }
    return kept.memory;
}
