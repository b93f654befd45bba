// A CUDA driver without a GPU: what devices/cuda.py calls, over files in the folder FAKE_CUDA names.
//
//   FAKE_CUDA/devices        how many devices there are, in decimal
//   FAKE_CUDA/<name>         one allocation; a handle is "fakecuda", the device as int32, and the name
//   FAKE_CUDA/fail           when there: the number of the error that every copy fails with
//
// "Device memory" is the mapping of such a file, so whoever opens a handle sees what others write.
// CUDA_VISIBLE_DEVICES is honoured: numbers, or the UUIDs that cuDeviceGetUuid tells.
#include <fcntl.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { unsigned char reserved[64]; } Handle;
typedef struct { unsigned char bytes[16]; } Uuid;
enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, MOST = 16 };

static int visible[MOST], visible_count, ready, current = -1;
static struct { uint64_t at; size_t size; } opened[256];

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

static int copies_fail(void) { return read_number("fail", 0); }

static void name_device(int device, char *text)   // as CUDA_VISIBLE_DEVICES takes it
{
    snprintf(text, 64, "GPU-fa4ecada-0000-4000-8000-%012d", device);
}

int cuInit(unsigned flags)
{
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
    ready = 1;
    return visible_count ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *count) { *count = visible_count; return ready ? OK : INVALID_CONTEXT; }
int cuDeviceGet(int *device, int number)
{
    if (number < 0 || number >= visible_count)
        return INVALID_DEVICE;
    *device = visible[number];
    return OK;
}
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Fake GPU %d", device); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(8 + device) << 30; return OK; }
int cuDeviceGetUuid_v2(Uuid *uuid, int device)
{
    static const unsigned char head[10] = {0xfa, 0x4e, 0xca, 0xda, 0, 0, 0x40, 0, 0x80, 0};
    memset(uuid, 0, sizeof *uuid);
    memcpy(uuid->bytes, head, sizeof head);
    uuid->bytes[15] = device;       // below 10: in hexadecimal as in decimal
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return OK; }
int cuCtxSetCurrent(void *context) { current = (int)(intptr_t)context - 1; return OK; }

int cuIpcOpenMemHandle_v2(uint64_t *at, Handle handle, unsigned flags)
{
    int device;
    char path[512];
    struct stat told;
    if (current < 0)
        return INVALID_CONTEXT;
    memcpy(&device, handle.reserved + 8, sizeof device);
    if (flags != 1 || memcmp(handle.reserved, "fakecuda", 8) || device != current)
        return INVALID_VALUE;
    path_of(path, sizeof path, (char *)handle.reserved + 12);
    int fd = open(path, O_RDWR);
    if (fd < 0 || fstat(fd, &told)) {
        if (fd >= 0)
            close(fd);
        return INVALID_VALUE;
    }
    void *memory = mmap(0, told.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return INVALID_VALUE;
    for (int i = 0; i < 256; i++)
        if (!opened[i].at) {
            opened[i].at = *at = (uint64_t)memory;
            opened[i].size = told.st_size;
            return OK;
        }
    return INVALID_VALUE;
}

static int find(uint64_t at)
{
    for (int i = 0; i < 256; i++)
        if (opened[i].at && at >= opened[i].at && at < opened[i].at + opened[i].size)
            return i;
    return -1;
}

int cuIpcCloseMemHandle(uint64_t at)
{
    int i = find(at);
    if (i < 0 || opened[i].at != at)
        return INVALID_VALUE;
    munmap((void *)at, opened[i].size);
    opened[i].at = 0;
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at)
{
    int i = find(at);
    if (i < 0)
        return INVALID_VALUE;
    *base = opened[i].at;
    *size = opened[i].size;
    return OK;
}

static int within(uint64_t at, size_t bytes)
{
    int i = find(at);
    return i >= 0 && at + bytes <= opened[i].at + opened[i].size;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    int fails = copies_fail();
    if (fails || !within(from, bytes))
        return fails ? fails : INVALID_VALUE;
    memcpy(to, (void *)from, bytes);
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    int fails = copies_fail();
    if (fails || !within(to, bytes))
        return fails ? fails : INVALID_VALUE;
    memcpy((void *)to, from, bytes);
    return OK;
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
    return OK;
}
