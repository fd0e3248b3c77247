/* tools/doctor.h: what k3-doctor looks at, each thing once, and what it found.
 *
 *   doctor_machine.c  toolchain, kernel, io_uring, memlock, shared memory, huge pages, control groups, CPU
 *   doctor_speed.c    drives and kernels, measured
 *   k3-doctor.c       options, the advice, the report */
#ifndef K3_TOOLS_DOCTOR_H
#define K3_TOOLS_DOCTOR_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "ipc/err.h"
#include "tools/plan.h"

enum k3_finding { K3_FOUND_OK, K3_FOUND_SLOW, K3_FOUND_BAD }; /* SLOW: k3 runs, at a price; BAD: it cannot run */
struct k3_doctor {
    cJSON *report;  /* an object; owned by the caller */
    cJSON *checks;  /* its array of {name, result, text} */
    uint32_t n_bad;
};
/* Prints one line and adds it to the report. */
void k3_doctor_say(struct k3_doctor *d, enum k3_finding f, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* A number of the last check, for the report. */
void k3_doctor_number(struct k3_doctor *d, const char *key, double value);

/* "6.1.0-9" -> 6, 1.  False when it does not begin so. */
bool k3_doctor_version(const char *release, unsigned *major, unsigned *minor);
void k3_doctor_machine(struct k3_doctor *d, const char *shm_dir);

struct k3_doctor_speed {
    struct k3_plan_device trunk, experts; /* rates 0: not known */
    double bf16_bytes_per_s, mxfp4_bytes_per_s; /* weights of one row, all threads */
};
/* dirs: n directories of weights; [0] is the trunk's.  n 0: only the CPU is measured. */
int k3_doctor_drives(struct k3_doctor *d, const char *const *dirs, size_t n, struct k3_doctor_speed *out, struct k3_err *err);
int k3_doctor_kernels(struct k3_doctor *d, struct k3_doctor_speed *out, struct k3_err *err);

#endif
