/* Direct-I/O alignment of the files that the schedule reads.  statx(STATX_DIOALIGN) came with Linux 6.1 and the C
 * library of Debian 12 does not declare its fields, so the call is made directly with the kernel's structure. */
#include <errno.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "model/schedule.h"

static uint32_t file_align(const char *path)
{
#ifdef STATX_DIOALIGN
    struct statx st;

    if (syscall(SYS_statx, AT_FDCWD, path, 0, STATX_DIOALIGN, &st) == 0 && (st.stx_mask & STATX_DIOALIGN)) {
        uint32_t a = st.stx_dio_offset_align > st.stx_dio_mem_align ? st.stx_dio_offset_align : st.stx_dio_mem_align;

        if (a > K3_PAGE_BYTES && a <= K3_HUGE_BYTES && (a & (a - 1)) == 0)
            return a;
    }
#else
    (void)path;
#endif
    return K3_PAGE_BYTES;
}

uint32_t k3_model_dio_align(const struct k3_model *m)
{
    uint32_t align = K3_PAGE_BYTES;

    for (size_t i = 0; i < m->n_files; i++) {
        uint32_t a = file_align(m->files[i].path);

        align = a > align ? a : align;
        for (uint32_t c = 0; c < m->files[i].n_copies; c++) {
            a = file_align(m->files[i].copies[c]);
            align = a > align ? a : align;
        }
    }
    return align;
}
