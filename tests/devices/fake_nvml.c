// NVML without a GPU, as devices/inventory.py calls it: FAKE_CUDA/devices says how many there are, and FAKE_CUDA/nvml,
// when there, the number of the error that every call fails with, and FAKE_CUDA/nvml-second the one of calls about
// the second GPU alone. That one tells neither power nor utilization.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned long long total, free, used; } Memory;
enum { NOT_SUPPORTED = 3, INVALID = 2 };

static int read_number(const char *name, int otherwise)
{
    char path[512];
    const char *folder = getenv("FAKE_CUDA");
    int value = otherwise;
    snprintf(path, sizeof path, "%s/%s", folder ? folder : "/nonexistent", name);
    FILE *file = fopen(path, "r");
    if (!file)
        return otherwise;
    if (fscanf(file, "%d", &value) != 1)
        value = otherwise;
    fclose(file);
    return value;
}

static int fails(void) { return read_number("nvml", 0); }
static int number(void *handle) { return (int)(intptr_t)handle - 1; }

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = read_number("devices", 0); return fails(); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    *handle = (void *)(intptr_t)(index + 1);
    if (index == 1 && read_number("nvml-second", 0))
        return read_number("nvml-second", 0);
    return index < (unsigned)read_number("devices", 0) ? fails() : INVALID;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    snprintf(text, size, "GPU-fa4ecada-0000-4000-8000-%012d", number(handle));
    return fails();
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    snprintf(text, size, "Fake GPU %d", number(handle));
    return fails();
}
int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates)
{
    rates->gpu = 25;
    rates->memory = 10;
    return number(handle) ? NOT_SUPPORTED : fails();
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory)
{
    memory->total = (8ull + number(handle)) << 30;
    memory->used = 1ull << 30;
    memory->free = memory->total - memory->used;
    return fails();
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts)
{
    *milliwatts = 70500;
    return number(handle) ? NOT_SUPPORTED : fails();
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts)
{
    *milliwatts = 700000;
    return number(handle) ? NOT_SUPPORTED : fails();
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    *millijoules = 123456;
    return number(handle) ? NOT_SUPPORTED : fails();
}
