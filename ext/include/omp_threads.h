// The threads of the OpenMP library that the process has loaded, as torch does: two pools would compete for the cores.
// GNU's entry, which Intel's and LLVM's libraries have as well.
#pragma once

#include <dlfcn.h>

namespace omp_threads {

typedef void Parallel(void (*work)(void*), void* given, unsigned threads, unsigned flags);

static Parallel* const parallel = (Parallel*)dlsym(RTLD_DEFAULT, "GOMP_parallel");
static int (*const number)() = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_thread_num");
static int (*const count)() = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_num_threads");

static bool are_there() { return parallel && number && count; }

}  // namespace omp_threads
