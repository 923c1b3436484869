/* What the machine can do at best, by the same thread pool as the kernels: bytes read, fused multiply-adds, products of
 * integers. Compiled by bench/kernels_cpu.py with the sources of aengine/kernels/native and the flags of one of its sets. */
#define _GNU_SOURCE
#include "internal.h"
#include "quantised.h"

#include <time.h>

enum { CHAINS = 12, ROUNDS = 20000 };

typedef struct {
    const char *data;
    int64_t bytes, sink;
} job;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Two streams side by side: the hardware's prefetchers follow each, and one alone reads a fifth less. */
static void read_part(void *arg, int part, int parts)
{
    job *j = arg;
    const int64_t line = 4 * 4 * AE_VL, lines = j->bytes / 2 / line;
    const char *one = j->data, *two = j->data + lines * line;
    vu s[8] = {{0}};
    for (int64_t i = lines * part / parts; i < lines * (part + 1) / parts; i++) {
        AE_UNROLL
        for (int k = 0; k < 4; k++) {
            s[k] |= *(const vu_mem *)(one + i * line + k * 4 * AE_VL);
            s[4 + k] |= *(const vu_mem *)(two + i * line + k * 4 * AE_VL);
        }
    }
    for (int k = 1; k < 8; k++) s[0] |= s[k];
    if (s[0][0] == 0x12345678) j->sink = 1;
}

#define CHAIN_PART(NAME, TYPE, STEP)                                                                 \
    static void NAME(void *arg, int part, int parts)                                                 \
    {                                                                                                \
        (void)parts;                                                                                 \
        TYPE s[CHAINS];                                                                              \
        AE_UNROLL                                                                                    \
        for (int k = 0; k < CHAINS; k++) s[k] = (TYPE)vf_set1(0.5f);                                 \
        vf f = vf_set1(0.5f);                                                                        \
        __asm__ volatile("" : "+x"(f));                                                              \
        vu w = (vu)f & 0x0f0f0f0f, x = (vu)f;                                                      \
        for (int i = 0; i < ROUNDS; i++) {                                                           \
            AE_UNROLL                                                                                \
            for (int k = 0; k < CHAINS; k++) {                                                       \
                s[k] = STEP;                                                                         \
                __asm__ volatile("" : "+x"(s[k]), "+x"(x), "+x"(f));                                \
            }                                                                                        \
        }                                                                                            \
        vu all = (vu)s[0] ^ w ^ x;                                                                   \
        AE_UNROLL                                                                                    \
        for (int k = 1; k < CHAINS; k++) all ^= (vu)s[k];                                            \
        if (all[0] == 0x12345678) ((job *)arg)->sink = part;                                         \
    }

CHAIN_PART(fma_part, vf, vf_fma(f, f, s[k]))
#if AE_SPLIT
CHAIN_PART(bytes_part, vi, add_16(s[k], multiply_bytes(w, x)))
CHAIN_PART(wide_part, vi, s[k] + multiply_pairs(w, x))
#else
CHAIN_PART(bytes_part, vi, codes_step(s[k], w, x))
CHAIN_PART(wide_part, vi, pairs_step(s[k], w, x))
#endif

static double timed(ae_pool *pool, ae_task task, job *j)
{
    const double began = now();
    ae_pool_run(pool, task, j, ae_pool_threads(pool));
    return now() - began;
}

AE_EXPORT double limit_read(ae_pool *pool, const void *data, int64_t bytes)
{
    job j = {data, bytes, 0};
    return (double)bytes / timed(pool, read_part, &j) / 1e9;
}

/* A multiply and an add are two operations. Bytes: 4-bit codes by 8-bit ones; wide: 16-bit by 16-bit; both exact. */
AE_EXPORT double limit_gops(ae_pool *pool, int kind)
{
    static const ae_task tasks[] = {fma_part, bytes_part, wide_part};
    const double each[] = {2.0 * AE_VL, 8.0 * AE_VL, 4.0 * AE_VL};
    job j = {0};
    return each[kind] * CHAINS * ROUNDS * ae_pool_threads(pool) / timed(pool, tasks[kind], &j) / 1e9;
}

AE_EXPORT ae_pool *limit_pool(int threads) { return ae_pool_create(threads); }
AE_EXPORT void limit_pool_close(ae_pool *pool) { ae_pool_destroy(pool); }
