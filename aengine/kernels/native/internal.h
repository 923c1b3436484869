/* What the translation units share: the thread pool, the context and the table of kernels of one instruction set. */
#ifndef AE_INTERNAL_H
#define AE_INTERNAL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "api.h"

#define AE_MAX_THREADS 256

typedef struct ae_pool ae_pool;

/* Part `part` of `parts` of a job; any thread of the pool may run it, the caller's too. */
typedef void (*ae_task)(void *arg, int part, int parts);

ae_pool *ae_pool_create(int threads);
void ae_pool_destroy(ae_pool *);
int ae_pool_threads(const ae_pool *);

/* Run all parts and return when the last has ended. One caller at a time (see context.c). */
void ae_pool_run(ae_pool *, ae_task, void *arg, int parts);

/* The number of the thread that runs the part that asks, below ae_pool_threads: 0 is the caller of ae_pool_run. */
int ae_pool_thread(void);

/* A buffer of at least `bytes`, 64-byte aligned, private to slot `part` (a part, or a thread); content is not kept. NULL: no memory.
 * The shared slots are for the caller of ae_pool_run, to hand to its parts. */
enum { AE_SHARED_A = AE_MAX_THREADS, AE_SHARED_B, AE_SCRATCH_SLOTS };
void *ae_pool_scratch(ae_pool *, int part, size_t bytes);

typedef struct {
    const char *name;
    int64_t panel;      /* outputs in one weight panel */
    int64_t code_panel; /* outputs in one panel of codes */
    int (*pack)(ae_context *, const ae_pack_args *);
    int (*linear)(ae_context *, const ae_linear_args *);
    int (*pack_quantised)(ae_context *, const ae_pack_quantised_args *);
    int (*unpack)(ae_context *, const ae_unpack_args *);
    int (*embed_packed)(ae_context *, const ae_embed_packed_args *);
    int (*rms_norm)(ae_context *, const ae_rms_norm_args *);
    int (*add)(ae_context *, const ae_add_args *);
    int (*glu)(ae_context *, const ae_glu_args *);
    int (*rope)(ae_context *, const ae_rope_args *);
    int (*attention)(ae_context *, const ae_attention_args *);
    int (*mul)(ae_context *, const ae_mul_args *);
    int (*scale_positions)(ae_context *, const ae_scale_positions_args *);
    int (*short_conv)(ae_context *, const ae_short_conv_args *);
    int (*mixture)(ae_context *, const ae_mixture_args *);
    int (*sample)(ae_context *, const ae_sample_args *);
    int (*logprobs)(ae_context *, const ae_logprobs_args *);
} ae_kernels;

/* Copies and index arithmetic, the same for every instruction set (step.c). */
int ae_run_take(ae_context *, const ae_take_args *);
int ae_run_columns(ae_context *, const ae_columns_args *);
int ae_run_put(ae_context *, const ae_put_args *);
int ae_run_lay_out(ae_context *, const ae_lay_out_args *);
int ae_run_settle(ae_context *, const ae_settle_args *);

struct ae_context {
    const ae_kernels *kernels;
    ae_pool *pool;
    pthread_mutex_t lock; /* one operation at a time; the pool and its scratch belong to it */
};

static inline int64_t ae_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ae_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ae_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t ae_round_up(int64_t a, int64_t b) { return ae_ceil_div(a, b) * b; }
static inline int64_t ae_dtype_bytes(int64_t dtype) { return dtype == AE_F32 ? 4 : 2; }

/* Threads worth waking for `work` units when one is worth `grain` of them (waking costs 1 to 5 us). */
static inline int ae_parts(const ae_context *ctx, int64_t work, int64_t grain)
{
    return (int)ae_max(1, ae_min(ae_pool_threads(ctx->pool), work / grain));
}

/* Parts of such work, several for each of `threads` where one is still worth `grain`: a thread that the system runs late,
 * because an event loop or a client has its core, then keeps the others waiting for a small part only, not so long that
 * they fall asleep. */
static inline int ae_fine_parts(int threads, int64_t work, int64_t grain)
{
    return threads == 1 ? 1 : (int)ae_max(threads, ae_min(16 * threads, work / grain));
}

/* The same for `rows` that are not cut. */
static inline int ae_row_parts(const ae_context *ctx, int64_t rows, int64_t row_work, int64_t grain)
{
    return (int)ae_min(ae_fine_parts(ae_parts(ctx, rows * row_work, grain), rows * row_work, grain), rows);
}

#endif
