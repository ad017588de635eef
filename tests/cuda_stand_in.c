/* A libcuda.so.1 for machines without NVIDIA's driver: cuda.h's C ABI, two GPUs of an H200's capability. Environment
 * variables take the GPUs away, or let a call hang. */
#include <stdlib.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100 };

int cuInit(unsigned flags) {
  if (getenv("CUDA_HANGS")) for (;;) pause();
  return flags ? INVALID_VALUE : getenv("CUDA_NO_DEVICE") ? NO_DEVICE : OK;
}
int cuDeviceGetCount(int *count) { *count = 2; return OK; }
int cuDeviceGet(int *gpu, int index) { *gpu = 40 + index; return index < 2 ? OK : INVALID_VALUE; }
int cuDeviceGetAttribute(int *value, int attribute, int gpu) {
  if (gpu < 40 || gpu > 41) return INVALID_VALUE;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
  return OK;
}
