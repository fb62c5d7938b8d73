/* A stand-in for the driver's libnvidia-ml.so.1: the GPUs that FAKE_NVML describes, a line each.
 *
 *   init|CODE                          what nvmlInit returns
 *   gpu|UUID|NAME|BYTES|FAILS|MIG      FAILS: 0, or the code with which every question about it ends;
 *                                      MIG: 1 on, 0 off, -1 not supported
 *   mig|UUID|NAME|BYTES                an instance of the GPU above; UUID "-": an empty place
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, MOST = 16, LONG = 96 };

struct device {
  char uuid[LONG], name[LONG];
  unsigned long long bytes;
  int fails, mig;
  unsigned int instances;
  struct device *instance[MOST];
};

static struct device gpus[MOST], migs[MOST];
static unsigned int gpu_count, mig_count;
static int opened;

int nvmlInitWithFlags(unsigned int flags) {
  const char *line = getenv("FAKE_NVML");
  int code = OK;
  (void)flags;
  gpu_count = mig_count = 0;
  memset(gpus, 0, sizeof gpus);
  memset(migs, 0, sizeof migs);
  for (; line != NULL && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
    struct device *one = &gpus[gpu_count < MOST ? gpu_count : MOST - 1];
    struct device *part = &migs[mig_count < MOST ? mig_count : MOST - 1];
    if (sscanf(line, "init|%d", &code) == 1) continue;
    if (sscanf(line, "gpu|%95[^|]|%95[^|]|%llu|%d|%d", one->uuid, one->name, &one->bytes, &one->fails, &one->mig) == 5)
      gpu_count++;
    else if (gpu_count && sscanf(line, "mig|%95[^|]|%95[^|]|%llu", part->uuid, part->name, &part->bytes) == 3) {
      struct device *whole = &gpus[gpu_count - 1];
      whole->instance[whole->instances++] = part;
      mig_count++;
    }
  }
  if (code == OK) opened++;
  return code;
}

int nvmlShutdown(void) {
  if (!opened) return UNINITIALIZED;
  opened--;
  return OK;
}

const char *nvmlErrorString(int code) {
  static char text[32];
  snprintf(text, sizeof text, "fake error %d", code);
  return text;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
  if (!opened) return UNINITIALIZED;
  *count = gpu_count;
  return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device) {
  if (!opened) return UNINITIALIZED;
  if (index >= gpu_count) return INVALID;
  *device = &gpus[index];
  return OK;
}

static int text(struct device *device, const char *from, char *to, unsigned int room) {
  if (!opened) return UNINITIALIZED;
  if (device->fails) return device->fails;
  snprintf(to, room, "%s", from);
  return OK;
}

int nvmlDeviceGetName(struct device *device, char *to, unsigned int room) { return text(device, device->name, to, room); }

int nvmlDeviceGetUUID(struct device *device, char *to, unsigned int room) { return text(device, device->uuid, to, room); }

int nvmlDeviceGetMemoryInfo(struct device *device, unsigned long long *total_free_used) {
  if (!opened) return UNINITIALIZED;
  if (device->fails) return device->fails;
  total_free_used[0] = total_free_used[1] = device->bytes;
  total_free_used[2] = 0;
  return OK;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned int *present, unsigned int *pending) {
  if (device->mig < 0) return NOT_SUPPORTED;
  *present = *pending = (unsigned int)device->mig;
  return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned int *count) {
  *count = device->instances;
  return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned int index, struct device **instance) {
  if (index >= device->instances || device->instance[index]->uuid[0] == '-') return NOT_FOUND;
  *instance = device->instance[index];
  return OK;
}
