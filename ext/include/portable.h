/* Read before everything else in the modules of a wheel (FASTSERVE_PORTABLE=1): a wheel that is built on a new
 * system asks for nothing that one with glibc 2.28 does not have. setup.py says which C++ library they take. */
#pragma once

/* The functions that glibc 2.29 has again without their old error handling: the results are the same. */
#if defined(__x86_64__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver exp, exp@GLIBC_2.17");
__asm__(".symver log, log@GLIBC_2.17");
#endif

/* What glibc 2.34 has moved from libpthread and libdl into libc, by the names that both have; Python loads them. */
#if defined(__x86_64__)
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
__asm__(".symver pthread_mutex_consistent, pthread_mutex_consistent@GLIBC_2.12");
__asm__(".symver pthread_mutexattr_init, pthread_mutexattr_init@GLIBC_2.2.5");
__asm__(".symver pthread_mutexattr_destroy, pthread_mutexattr_destroy@GLIBC_2.2.5");
__asm__(".symver pthread_mutexattr_setpshared, pthread_mutexattr_setpshared@GLIBC_2.2.5");
__asm__(".symver pthread_mutexattr_setrobust, pthread_mutexattr_setrobust@GLIBC_2.12");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.17");
__asm__(".symver pthread_mutex_consistent, pthread_mutex_consistent@GLIBC_2.17");
__asm__(".symver pthread_mutexattr_init, pthread_mutexattr_init@GLIBC_2.17");
__asm__(".symver pthread_mutexattr_destroy, pthread_mutexattr_destroy@GLIBC_2.17");
__asm__(".symver pthread_mutexattr_setpshared, pthread_mutexattr_setpshared@GLIBC_2.17");
__asm__(".symver pthread_mutexattr_setrobust, pthread_mutexattr_setrobust@GLIBC_2.17");
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#endif

/* Of glibc 2.32, and read by the C++ library alone: 0 has it count references atomically. */
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

/* Of GCC 11's C++ library: called for an array of a length that no memory has. */
#include <bits/functexcept.h>
namespace std {
inline void __throw_bad_array_new_length() { __throw_bad_alloc(); }
}
