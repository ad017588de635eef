/* A libnvidia-ml.so.1 for machines without NVIDIA's driver: the functions that the sampler asks for, with nvml.h's C
 * ABI, for two GPUs with known values. Environment variables make the second GPU hot, slow or lost, or crash or hang. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
typedef struct gpu { unsigned index; unsigned asked; } gpu_t;
static gpu_t gpus[2] = {{0, 0}, {1, 0}};

static int says(const char *name) { const char *value = getenv(name); return value && value[0] == '1'; }
#define LIVES(gpu) do { if ((gpu)->index == 1 && says("NVML_LOST")) return GPU_IS_LOST; } while (0)

int nvmlInit_v2(void) {
  if (says("NVML_CRASHES")) abort();
  if (says("NVML_HANGS")) for (;;) pause();
  return says("NVML_NO_DRIVER") ? DRIVER_NOT_LOADED : OK;
}
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "570.124.06"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) { *gpu = &gpus[index]; return OK; }
int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned size) { snprintf(text, size, "GPU-%08x", 0xabc0 + gpu->index); return OK; }
int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned size) { (void)gpu; snprintf(text, size, "NVIDIA H200"); return OK; }
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci_t;
int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *pci) { snprintf(pci->address, 32, "00000000:%02X:00.0", 0x3b + gpu->index); return OK; }
int nvmlDeviceGetEnforcedPowerLimit(gpu_t *gpu, unsigned *milliwatts) { *milliwatts = gpu->index ? 500000 : 700000; return OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(gpu_t *gpu, unsigned *milliwatts) { (void)gpu; *milliwatts = 700000; return OK; }
int nvmlDeviceGetMaxClockInfo(gpu_t *gpu, int clock, unsigned *mhz) { (void)gpu; *mhz = clock == 1 ? 1980 : 3201; return OK; }
int nvmlDeviceGetClockInfo(gpu_t *gpu, int clock, unsigned *mhz) {
  LIVES(gpu);
  *mhz = clock == 2 ? 3201 : gpu->index && says("NVML_HOT") ? 1200 : 1980;
  return OK;
}
int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *milliwatts) {
  LIVES(gpu);
  *milliwatts = 650500 - 100000 * gpu->index + 1000 * (gpu->asked++ % 3);
  return OK;
}
int nvmlDeviceGetTemperature(gpu_t *gpu, int sensor, unsigned *celsius) {
  LIVES(gpu);
  *celsius = sensor ? 0 : gpu->index && says("NVML_HOT") ? 88 : 61 + gpu->index;
  return OK;
}
typedef struct { unsigned gpu, memory; } utilisation_t;
int nvmlDeviceGetUtilizationRates(gpu_t *gpu, utilisation_t *found) { LIVES(gpu); found->gpu = 99 - gpu->index; found->memory = 41; return OK; }
typedef struct { unsigned long long total, free, used; } memory_t;
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *found) {
  LIVES(gpu);
  found->total = 143771ull << 20; found->used = (1000ull + gpu->index) << 20; found->free = found->total - found->used;
  return OK;
}
/* The old name alone, as drivers before 535 have it. */
int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *gpu, unsigned long long *bits) {
  LIVES(gpu);
  *bits = gpu->index && says("NVML_HOT") ? 0x40 | 0x8 : 0x4;
  return OK;
}
int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, int kind, int counter, unsigned long long *count) {
  LIVES(gpu);
  if (gpu->index == 0) return NOT_SUPPORTED;
  *count = counter ? 1000 : kind ? 2 * says("NVML_ECC") * (gpu->asked > 2) : 7;
  return OK;
}
/* As of an H200: 18 links. */
int nvmlDeviceGetNvLinkState(gpu_t *gpu, unsigned link, unsigned *up) {
  LIVES(gpu);
  *up = !(gpu->index && link == 7 && says("NVML_LINK_DOWN"));
  return OK;
}
/* Two sockets: even processors are near GPU 0, odd ones near GPU 1. */
int nvmlDeviceGetCpuAffinity(gpu_t *gpu, unsigned words, unsigned long *set) {
  LIVES(gpu);
  for (unsigned i = 0; i < words; i++) set[i] = i ? 0 : gpu->index ? 0xaaul : 0x55ul;
  return OK;
}
int nvmlDeviceGetMaxPcieLinkWidth(gpu_t *gpu, unsigned *lanes) { LIVES(gpu); *lanes = 16; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(gpu_t *gpu, unsigned *lanes) {
  LIVES(gpu);
  *lanes = gpu->index && says("NVML_NARROW") ? 8 : 16;
  return OK;
}
/* More with each question: 70 after the check, or 140 as on a link that is damaged. */
int nvmlDeviceGetPcieReplayCounter(gpu_t *gpu, unsigned *replays) {
  static unsigned asked[2];
  LIVES(gpu);
  *replays = asked[gpu->index]++ * (gpu->index && says("NVML_REPLAYS") ? 140 : 70);
  return OK;
}
typedef struct { uint32_t field, scope; int64_t time, latency; int type, result; union { double d; unsigned u; unsigned long long ull; } value; } field_t;
int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *fields) {
  LIVES(gpu);
  for (int i = 0; i < count; i++) {
    fields[i].result = OK;
    if (fields[i].field == 82) { fields[i].type = 1; fields[i].value.u = 70 + gpu->index; }
    else if (fields[i].field == 52) { fields[i].type = 3; fields[i].value.ull = 12 * gpu->index * (says("NVML_LINK_ERRORS") ? 1 + gpu->asked++ : 1); }
    else if (fields[i].field == 59) { fields[i].type = 3; fields[i].value.ull = 1; }
    else fields[i].result = NOT_SUPPORTED;
  }
  return OK;
}
