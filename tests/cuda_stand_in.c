/* A libcuda.so.1 for machines without NVIDIA's driver: cuda.h's C ABI, an H200 and an A100. Environment
 * variables take the GPUs away, let a call hang, or name a file for the processes that have opened it. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100 };

int cuInit(unsigned flags) {
  const char *callers = getenv("CUDA_CALLERS");
  FILE *file = callers ? fopen(callers, "a") : NULL;
  if (file) { fprintf(file, "%d\n", getpid()); fclose(file); }
  if (getenv("CUDA_HANGS")) for (;;) pause();
  return flags ? INVALID_VALUE : getenv("CUDA_NO_DEVICE") ? NO_DEVICE : OK;
}
int cuDeviceGetCount(int *count) { *count = 2; return OK; }
int cuDeviceGet(int *gpu, int index) { *gpu = 40 + index; return index < 2 ? OK : INVALID_VALUE; }
int cuDeviceGetAttribute(int *value, int attribute, int gpu) {
  if (gpu < 40 || gpu > 41) return INVALID_VALUE;
  *value = attribute == 75 ? (gpu == 40 ? 9 : 8) : attribute == 76 ? 0 : -1;
  return OK;
}
