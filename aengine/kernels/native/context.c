/* Contexts: which instruction set, how many threads; the exported operations; memory for weights.
 *
 * A context runs one operation at a time (callers queue on its lock), because the pool and its scratch are one set.
 * After fork() a child must not use a context of its parent: the pool's threads do not exist there.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* The build defines AE_SETS(X) as X(name) X(name) .. for every set it compiled, the best first. */
#define AE_DECLARE(NAME) extern const ae_kernels ae_kernels_##NAME;
#define AE_ADDRESS(NAME) &ae_kernels_##NAME,
AE_SETS(AE_DECLARE)
static const ae_kernels *const compiled[] = {AE_SETS(AE_ADDRESS) NULL};

#define AE_HUGE_PAGE (2 << 20)

#if defined(__x86_64__)
enum { X86_AVX2 = 1, X86_AVX2VNNI = 2, X86_AVX512 = 4, X86_AVX512VNNI = 8 };

/* Asked of the processor itself: not every compiler's run-time library answers __builtin_cpu_supports. The system must
 * also save the registers (xgetbv: bits 1, 2 for 256-bit, 5 to 7 for 512-bit and masks). */
static int x86_features(void)
{
    const unsigned wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL, avx_vnni = 1 << 4;
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA) || !(c & bit_F16C) || !(c & bit_OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if ((saved & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    int has = X86_AVX2;
    if ((saved & 0xe0) == 0xe0 && (b & wide) == wide) has |= X86_AVX512 | (c & bit_AVX512VNNI ? X86_AVX512VNNI : 0);
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & avx_vnni)) has |= X86_AVX2VNNI;
    return has;
}
#endif

static int machine_has(const char *isa)
{
#if defined(__x86_64__)
    static const struct {
        const char *name;
        int needs;
    } sets[] = {{"avx512vnni", X86_AVX512VNNI}, {"avx512", X86_AVX512}, {"avx2vnni", X86_AVX2VNNI}, {"avx2", X86_AVX2}};
    if (strncmp(isa, "emulated_", 9) == 0) return x86_features() & X86_AVX2;
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (strcmp(isa, sets[i].name) == 0) return x86_features() & sets[i].needs;
#endif
    return strcmp(isa, "portable") == 0;
}

static const ae_kernels *choose(const char *isa)
{
    for (const ae_kernels *const *k = compiled; *k; k++)
        if ((!isa || strcmp(isa, (*k)->name) == 0) && machine_has((*k)->name)) return *k;
    return NULL;
}

int ae_abi(void) { return AE_ABI; }

ae_context *ae_context_create(const char *isa, int threads)
{
    const ae_kernels *kernels = choose(isa);
    ae_context *ctx = kernels ? calloc(1, sizeof *ctx) : NULL;
    if (!ctx) return NULL;
    ctx->kernels = kernels;
    ctx->pool = ae_pool_create(threads);
    if (!ctx->pool) {
        free(ctx);
        return NULL;
    }
    pthread_mutex_init(&ctx->lock, NULL);
    return ctx;
}

void ae_context_destroy(ae_context *ctx)
{
    ae_pool_destroy(ctx->pool);
    pthread_mutex_destroy(&ctx->lock);
    free(ctx);
}

const char *ae_context_isa(const ae_context *ctx) { return ctx->kernels->name; }
int ae_context_threads(const ae_context *ctx) { return ae_pool_threads(ctx->pool); }

int ae_context_set_threads(ae_context *ctx, int threads)
{
    ae_pool *pool = ae_pool_create(threads);
    if (!pool) return AE_NO_MEMORY;
    pthread_mutex_lock(&ctx->lock);
    ae_pool *old = ctx->pool;
    ctx->pool = pool;
    pthread_mutex_unlock(&ctx->lock);
    ae_pool_destroy(old);
    return AE_OK;
}

void *ae_alloc(int64_t bytes)
{
    const size_t size = (size_t)ae_round_up(bytes, AE_HUGE_PAGE);
    char *base = mmap(NULL, size + AE_HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    const size_t lead = (size_t)(-(uintptr_t)base % AE_HUGE_PAGE);
    if (lead) munmap(base, lead);
    if (lead < AE_HUGE_PAGE) munmap(base + lead + size, AE_HUGE_PAGE - lead);
#if defined(MADV_HUGEPAGE)
    madvise(base + lead, size, MADV_HUGEPAGE); /* read rate 13-22 -> 29 GB/s a thread; no harm where refused */
#endif
    return base + lead;
}

void ae_touch(void *p, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 4096) {
        char zero = 0; /* untouched memory holds it, so that it is written; the rest stays as it is */
        __atomic_compare_exchange_n((char *)p + i, &zero, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

void ae_free(void *p, int64_t bytes)
{
    if (p) munmap(p, (size_t)ae_round_up(bytes, AE_HUGE_PAGE));
}

int64_t ae_packed_bytes(const ae_context *ctx, int64_t dtype, int64_t in_features, int64_t out_features)
{
    return ae_round_up(out_features, ctx->kernels->panel) * in_features * ae_dtype_bytes(dtype);
}

int64_t ae_codes_bytes(const ae_context *ctx, int64_t bits, int64_t in_features, int64_t out_features)
{
    return ae_round_up(out_features, ctx->kernels->code_panel) * ae_round_up(in_features, 32) * (bits == 4 ? 4 : 8) / 8;
}

int64_t ae_scale_bytes(const ae_context *ctx, int64_t bits, int64_t group, int64_t scale_dtype, int64_t in_features,
                       int64_t out_features)
{
    const int64_t groups = ae_ceil_div(ae_round_up(in_features, 32), group);
    return ae_round_up(out_features, ctx->kernels->code_panel) * groups * ae_dtype_bytes(scale_dtype);
}

static int embed(ae_context *ctx, const ae_embed_args *a)
{
    const size_t bytes = (size_t)(a->dim * ae_dtype_bytes(a->dtype));
    for (int64_t t = 0; t < a->rows; t++)
        memcpy((char *)a->out + (size_t)t * bytes, (const char *)a->table + (size_t)a->ids[t] * bytes, bytes);
    (void)ctx;
    return AE_OK;
}

/* One exported function per operation: take the lock, run the kernel of the context's instruction set. */
#define AE_OPERATION(NAME, KERNEL)                             \
    int ae_##NAME(ae_context *ctx, const ae_##NAME##_args *a)  \
    {                                                          \
        pthread_mutex_lock(&ctx->lock);                        \
        const int status = KERNEL(ctx, a);                     \
        pthread_mutex_unlock(&ctx->lock);                      \
        return status;                                         \
    }

AE_OPERATION(pack, ctx->kernels->pack)
AE_OPERATION(linear, ctx->kernels->linear)
AE_OPERATION(pack_quantised, ctx->kernels->pack_quantised)
AE_OPERATION(unpack, ctx->kernels->unpack)
AE_OPERATION(embed, embed)
AE_OPERATION(embed_packed, ctx->kernels->embed_packed)
AE_OPERATION(rms_norm, ctx->kernels->rms_norm)
AE_OPERATION(add, ctx->kernels->add)
AE_OPERATION(glu, ctx->kernels->glu)
AE_OPERATION(rope, ctx->kernels->rope)
AE_OPERATION(attention, ctx->kernels->attention)
AE_OPERATION(mul, ctx->kernels->mul)
AE_OPERATION(scale_positions, ctx->kernels->scale_positions)
AE_OPERATION(take, ae_run_take)
AE_OPERATION(columns, ae_run_columns)
AE_OPERATION(put, ae_run_put)
AE_OPERATION(short_conv, ctx->kernels->short_conv)
AE_OPERATION(mixture, ctx->kernels->mixture)
AE_OPERATION(lay_out, ae_run_lay_out)
AE_OPERATION(sample, ctx->kernels->sample)
AE_OPERATION(logprobs, ctx->kernels->logprobs)
AE_OPERATION(settle, ae_run_settle)

int64_t ae_operation(const char *name)
{
    static const char *const names[AE_OP_COUNT] = {
        [AE_OP_LINEAR] = "linear",         [AE_OP_EMBED] = "embed",
        [AE_OP_RMS_NORM] = "rms_norm",     [AE_OP_ADD] = "add",
        [AE_OP_GLU] = "glu",               [AE_OP_ROPE] = "rope",
        [AE_OP_ATTENTION] = "attention",   [AE_OP_MUL] = "mul",
        [AE_OP_TAKE] = "take",             [AE_OP_SCALE_POSITIONS] = "scale_positions",
        [AE_OP_PUT] = "put",               [AE_OP_SHORT_CONV] = "short_conv",
        [AE_OP_MIXTURE] = "mixture",       [AE_OP_LAY_OUT] = "lay_out",
        [AE_OP_SAMPLE] = "sample",         [AE_OP_LOGPROBS] = "logprobs",
        [AE_OP_SETTLE] = "settle",         [AE_OP_EMBED_PACKED] = "embed_packed",
        [AE_OP_COLUMNS] = "columns",
    };
    for (int64_t op = 0; op < AE_OP_COUNT; op++)
        if (names[op] && strcmp(names[op], name) == 0) return op;
    return -1;
}

static int run_one(ae_context *ctx, const ae_call *call)
{
    const ae_kernels *k = ctx->kernels;
    switch (call->op) {
    case AE_OP_LINEAR: return k->linear(ctx, call->args);
    case AE_OP_EMBED: return embed(ctx, call->args);
    case AE_OP_RMS_NORM: return k->rms_norm(ctx, call->args);
    case AE_OP_ADD: return k->add(ctx, call->args);
    case AE_OP_GLU: return k->glu(ctx, call->args);
    case AE_OP_ROPE: return k->rope(ctx, call->args);
    case AE_OP_ATTENTION: return k->attention(ctx, call->args);
    case AE_OP_MUL: return k->mul(ctx, call->args);
    case AE_OP_SCALE_POSITIONS: return k->scale_positions(ctx, call->args);
    case AE_OP_TAKE: return ae_run_take(ctx, call->args);
    case AE_OP_COLUMNS: return ae_run_columns(ctx, call->args);
    case AE_OP_PUT: return ae_run_put(ctx, call->args);
    case AE_OP_SHORT_CONV: return k->short_conv(ctx, call->args);
    case AE_OP_MIXTURE: return k->mixture(ctx, call->args);
    case AE_OP_LAY_OUT: return ae_run_lay_out(ctx, call->args);
    case AE_OP_SAMPLE: return k->sample(ctx, call->args);
    case AE_OP_LOGPROBS: return k->logprobs(ctx, call->args);
    case AE_OP_SETTLE: return ae_run_settle(ctx, call->args);
    case AE_OP_EMBED_PACKED: return k->embed_packed(ctx, call->args);
    default: return AE_BAD_CALL;
    }
}

int ae_program_run(ae_context *ctx, const ae_call *calls, int64_t count)
{
    int status = AE_OK;
    pthread_mutex_lock(&ctx->lock);
    for (int64_t i = 0; i < count && status == AE_OK; i++) status = run_one(ctx, &calls[i]);
    pthread_mutex_unlock(&ctx->lock);
    return status;
}
