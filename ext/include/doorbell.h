// Doorbells between processes: an eventfd to wake a sleeper, a flag in shared memory to spare the call.
#pragma once
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static inline void doorbell_ring(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static inline void doorbell_clear(int fd)
{
    uint64_t count;
    while (fd >= 0 && read(fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
}

// Bits: 1 = the doorbell rang (it is cleared), 2 = the control descriptor is readable or hung up. 0 = timeout.
static inline int doorbell_wait(int doorbell, int control, int64_t timeout_ns)
{
    struct pollfd fds[2] = {{doorbell, POLLIN, 0}, {control, POLLIN, 0}};
    struct timespec timeout = {(time_t)(timeout_ns / 1000000000), (long)(timeout_ns % 1000000000)};
    if (ppoll(fds, 2, timeout_ns < 0 ? NULL : &timeout, NULL) <= 0)
        return 0;
    if (fds[0].revents)
        doorbell_clear(doorbell);
    return (fds[0].revents ? 1 : 0) | (fds[1].revents ? 2 : 0);
}

static inline uint32_t flag_exchange(uint32_t *at, uint32_t value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
static inline uint32_t flag_load(const uint32_t *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }

static inline void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
