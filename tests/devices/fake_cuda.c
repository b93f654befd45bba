// A CUDA driver without a GPU: what devices/cuda.py calls, over files in the folder FAKE_CUDA names.
//
//   FAKE_CUDA/devices        how many devices there are, in decimal
//   FAKE_CUDA/mig            when there: each of them is a MIG instance
//   FAKE_CUDA/<name>         one allocation; a handle is "fakecuda", the device as int32, and the name
//   FAKE_CUDA/fail           when there: the number of the error that every copy fails with
//   FAKE_CUDA/shy            when there: of memory that another process lends, no range is told
//   FAKE_CUDA/unpinnable     when there: no memory of the host can be registered
//   FAKE_CUDA/handles        when there: each handle opened or closed is told here: "1234 open fa21.. 1", the last of
//                            it how often it is open in that process from then on
//   FAKE_CUDA/broken         written here: rules of the driver's that a process has broken
//
// "Device memory" is the mapping of such a file, so whoever opens a handle sees what others write.
// CUDA_VISIBLE_DEVICES is honoured: numbers, or the UUIDs that cuDeviceGetUuid tells.
//
// What the driver's documentation asks of its callers is asked here: cuInit first, and not in a parent of this
// process; a context on each thread; a handle closed as often as it was opened, in the context that opened it;
// registered memory in whole pages, once, and unregistered while it is still mapped. A copy to the device out
// of memory that is not registered is over when the context has been synchronised, and not before.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { unsigned char reserved[64]; } Handle;
typedef struct { unsigned char bytes[16]; } Uuid;
enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       NOT_PERMITTED = 800, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, MOST = 16, MANY = 256 };

static int visible[MOST], visible_count;
static pid_t ready;
static __thread int current = -1;
static struct { uint64_t at; size_t size; int device, count; Handle handle; } opened[MANY];
static struct { uint64_t at; size_t size; } registered[MANY];
static struct { void *to, *bytes; size_t size; } late[MANY];
static int late_count;
static pthread_mutex_t turn = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static void leave(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }

#define ALONE __attribute__((cleanup(leave))) pthread_mutex_t *held = &turn; pthread_mutex_lock(held)

static void path_of(char *into, size_t size, const char *name)
{
    const char *folder = getenv("FAKE_CUDA");
    snprintf(into, size, "%s/%s", folder ? folder : "/nonexistent", name);
}

static int read_number(const char *name, int otherwise)
{
    char path[512];
    path_of(path, sizeof path, name);
    FILE *file = fopen(path, "r");
    int value = otherwise;
    if (!file)
        return otherwise;
    if (fscanf(file, "%d", &value) != 1)
        value = otherwise;
    fclose(file);
    return value;
}

static int is_there(const char *name)
{
    char path[512];
    path_of(path, sizeof path, name);
    return !access(path, F_OK);
}

static int broken(int code, const char *rule)
{
    char path[512];
    path_of(path, sizeof path, "broken");
    FILE *file = fopen(path, "a");
    if (file) {
        fprintf(file, "%d: %s\n", (int)getpid(), rule);
        fclose(file);
    }
    return code;
}

static int touches(uint64_t at, size_t size, int within);

static void tell_handle(const char *what, int i)
{
    char path[512];
    path_of(path, sizeof path, "handles");
    FILE *file = is_there("handles") ? fopen(path, "a") : NULL;
    if (!file)
        return;
    fprintf(file, "%d %s %s %d\n", (int)getpid(), what, (char *)opened[i].handle.reserved + 12, opened[i].count);
    fclose(file);
}

static int copies_fail(void)
{
    return read_number("fail", 0);
}

static void arrive(void)        // what was on its way to the device is there
{
    for (int i = 0; i < late_count; i++) {
        memcpy(late[i].to, late[i].bytes, late[i].size);
        free(late[i].bytes);
    }
    late_count = 0;
}

#define ENTERED ALONE; do { \
    if (!ready) return broken(NOT_INITIALIZED, "a call before cuInit"); \
    if (ready != getpid()) return broken(NOT_INITIALIZED, "a call in a child of the process that called cuInit"); \
} while (0)
#define IN_CONTEXT ENTERED; do { if (current < 0) return broken(INVALID_CONTEXT, "a thread without a context"); } while (0)

static void name_device(int device, char *text)   // as CUDA_VISIBLE_DEVICES takes it
{
    snprintf(text, 64, "%s-fa4ecada-0000-4000-8000-%012d", is_there("mig") ? "MIG" : "GPU", device);
}

int cuInit(unsigned flags)
{
    ALONE;
    int count = read_number("devices", 0);
    if (flags || count < 1)
        return NO_DEVICE;
    visible_count = 0;
    const char *asked = getenv("CUDA_VISIBLE_DEVICES");
    if (!asked) {
        for (int i = 0; i < count; i++)
            visible[visible_count++] = i;
    } else {
        char list[1024], *rest = list;
        snprintf(list, sizeof list, "%s", asked);
        for (char *one; (one = strsep(&rest, ",")) && *one && visible_count < MOST;) {
            int found = -1;
            for (int i = 0; i < count; i++) {
                char name[64], number[16];
                name_device(i, name);
                snprintf(number, sizeof number, "%d", i);
                if (!strcmp(one, name) || !strcmp(one, number))
                    found = i;
            }
            if (found < 0)
                break;      // as there: the list ends at the first that is none
            visible[visible_count++] = found;
        }
    }
    ready = getpid();
    return visible_count ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *count) { ENTERED; *count = visible_count; return OK; }
int cuDeviceGet(int *device, int number)
{
    ENTERED;
    if (number < 0 || number >= visible_count)
        return INVALID_DEVICE;
    *device = visible[number];
    return OK;
}
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake GPU %d", device); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(8 + device) << 30; return OK; }
static int tell_uuid(Uuid *uuid, int number)
{
    static const unsigned char head[10] = {0xfa, 0x4e, 0xca, 0xda, 0, 0, 0x40, 0, 0x80, 0};
    memset(uuid, 0, sizeof *uuid);
    memcpy(uuid->bytes, head, sizeof head);
    uuid->bytes[15] = number;       // below 10: in hexadecimal as in decimal
    return OK;
}
int cuDeviceGetUuid_v2(Uuid *uuid, int device) { ENTERED; return tell_uuid(uuid, device); }
int cuDeviceGetUuid(Uuid *uuid, int device) { ENTERED; return tell_uuid(uuid, is_there("mig") ? 99 : device); }
int cuDevicePrimaryCtxRetain(void **context, int device) { ENTERED; *context = (void *)(intptr_t)(device + 1); return OK; }
int cuCtxSetCurrent(void *context) { ENTERED; current = (int)(intptr_t)context - 1; return OK; }
int cuCtxSynchronize(void) { IN_CONTEXT; arrive(); return OK; }

int cuIpcOpenMemHandle_v2(uint64_t *at, Handle handle, unsigned flags)
{
    int device, free_one = -1;
    char path[512];
    struct stat told;
    IN_CONTEXT;
    memcpy(&device, handle.reserved + 8, sizeof device);
    if (flags != 1 || memcmp(handle.reserved, "fakecuda", 8) || device != current)
        return INVALID_VALUE;
    for (int i = 0; i < MANY; i++) {
        if (!opened[i].count)
            free_one = free_one < 0 ? i : free_one;
        else if (opened[i].device == current && !memcmp(&opened[i].handle, &handle, sizeof handle)) {
            opened[i].count++;      // as there: counted, and the same address
            tell_handle("open", i);
            *at = opened[i].at;
            return OK;
        }
    }
    path_of(path, sizeof path, (char *)handle.reserved + 12);
    int fd = open(path, O_RDWR);
    if (fd < 0 || fstat(fd, &told) || free_one < 0) {
        if (fd >= 0)
            close(fd);
        return INVALID_VALUE;
    }
    void *memory = mmap(0, told.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return INVALID_VALUE;
    opened[free_one].at = *at = (uint64_t)memory;
    opened[free_one].size = told.st_size;
    opened[free_one].device = current;
    opened[free_one].count = 1;
    opened[free_one].handle = handle;
    tell_handle("open", free_one);
    return OK;
}

static int find(uint64_t at)
{
    for (int i = 0; i < MANY; i++)
        if (opened[i].count && at >= opened[i].at && at < opened[i].at + opened[i].size)
            return i;
    return -1;
}

int cuIpcCloseMemHandle(uint64_t at)
{
    IN_CONTEXT;
    int i = find(at);
    if (i < 0 || opened[i].at != at)
        return broken(INVALID_VALUE, "a handle closed that is not open");
    if (opened[i].device != current)
        return broken(INVALID_CONTEXT, "a handle closed in another context than opened it");
    arrive();
    opened[i].count--;
    if (!opened[i].count)
        munmap((void *)at, opened[i].size);
    tell_handle("close", i);    // now: whoever reads of it may free the memory
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at)
{
    IN_CONTEXT;
    int i = is_there("shy") ? -1 : find(at);
    if (i < 0)
        return INVALID_VALUE;
    *base = opened[i].at;
    *size = opened[i].size;
    return OK;
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t at)
{
    IN_CONTEXT;
    int i = is_there("shy") ? -1 : find(at);
    if (i < 0)
        return INVALID_VALUE;
    switch (attribute) {
    case 9:
        for (int k = 0; k < visible_count; k++)
            if (visible[k] == opened[i].device)
                *(int *)data = k;
        return OK;
    case 11: *(uint64_t *)data = opened[i].at; return OK;
    case 12: *(size_t *)data = opened[i].size; return OK;
    }
    return INVALID_VALUE;
}

// Memory of this process's own, that it may lend.
int cuMemAlloc_v2(uint64_t *at, size_t size)
{
    static int made;
    char name[64], path[512];
    IN_CONTEXT;
    snprintf(name, sizeof name, "own-%d-%d", (int)getpid(), made++);
    path_of(path, sizeof path, name);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0 || ftruncate(fd, size))
        return 2;
    close(fd);
    Handle handle = {"fakecuda"};
    memcpy(handle.reserved + 8, &current, sizeof current);
    strcpy((char *)handle.reserved + 12, name);
    return cuIpcOpenMemHandle_v2(at, handle, 1);
}

int cuIpcGetMemHandle(Handle *handle, uint64_t at)
{
    IN_CONTEXT;
    int i = find(at);
    if (i < 0)
        return INVALID_VALUE;
    *handle = opened[i].handle;
    return OK;
}

int cuMemFree_v2(uint64_t at)
{
    char path[512];
    IN_CONTEXT;
    int i = find(at);
    if (i < 0 || opened[i].at != at)
        return broken(INVALID_VALUE, "memory freed that is none");
    path_of(path, sizeof path, (char *)opened[i].handle.reserved + 12);
    unlink(path);
    return cuIpcCloseMemHandle(at);
}

static int is_mapped(uint64_t at, size_t size)
{
    unsigned char *pages = malloc(size / 4096 + 1);
    int mapped = !mincore((void *)at, size, pages);
    free(pages);
    return mapped;
}

static int touches(uint64_t at, size_t size, int within)
{
    for (int i = 0; i < MANY; i++)
        if (registered[i].size && (within ? at >= registered[i].at && at + size <= registered[i].at + registered[i].size
                                          : at < registered[i].at + registered[i].size && registered[i].at < at + size))
            return 1;
    return 0;
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags)
{
    IN_CONTEXT;
    uint64_t at = (uint64_t)memory;
    if (is_there("unpinnable"))
        return NOT_PERMITTED;
    if (!size || flags != 1)
        return broken(INVALID_VALUE, "nothing registered, or with other flags");
    if (at % 4096 || size % 4096)
        return broken(INVALID_VALUE, "memory registered that is not whole pages");
    if (!is_mapped(at, size))
        return broken(INVALID_VALUE, "memory registered that is not mapped");
    if (touches(at, size, 0))
        return broken(ALREADY_REGISTERED, "memory registered twice");
    for (int i = 0; i < MANY; i++)
        if (!registered[i].size) {
            registered[i].at = at;
            registered[i].size = size;
            return OK;
        }
    return INVALID_VALUE;
}

int cuMemHostUnregister(void *memory)
{
    IN_CONTEXT;
    for (int i = 0; i < MANY; i++)
        if (registered[i].size && registered[i].at == (uint64_t)memory) {
            int mapped = is_mapped(registered[i].at, registered[i].size);
            registered[i].size = 0;
            return mapped ? OK : broken(INVALID_VALUE, "memory was unmapped while it was registered");
        }
    return broken(NOT_REGISTERED, "memory unregistered that is not registered");
}

static int within(uint64_t at, size_t bytes)
{
    int i = find(at);
    return i >= 0 && at + bytes <= opened[i].at + opened[i].size;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    IN_CONTEXT;
    int fails = copies_fail();
    if (fails || !within(from, bytes))
        return fails ? fails : INVALID_VALUE;
    if (touches((uint64_t)to, bytes, 0) && !touches((uint64_t)to, bytes, 1))
        return broken(INVALID_VALUE, "a copy of memory that is registered in part");
    arrive();
    memcpy(to, (void *)from, bytes);
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    IN_CONTEXT;
    int fails = copies_fail();
    if (fails || !within(to, bytes))
        return fails ? fails : INVALID_VALUE;
    if (touches((uint64_t)from, bytes, 0) && !touches((uint64_t)from, bytes, 1))
        return broken(INVALID_VALUE, "a copy of memory that is registered in part");
    arrive();
    if (touches((uint64_t)from, bytes, 1)) {
        memcpy((void *)to, from, bytes);
        return OK;
    }
    late[late_count].to = (void *)to;   // the driver has taken the bytes: they are not on the device yet
    late[late_count].bytes = malloc(bytes);
    late[late_count].size = bytes;
    memcpy(late[late_count++].bytes, from, bytes);
    return OK;
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_UNKNOWN";
    return OK;
}
