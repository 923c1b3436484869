/* A pool of threads that runs one job at a time, whose parts are taken by whoever comes first.
 *
 * The caller takes parts too, and waits only for those that a worker has begun: a worker that the system runs late, or
 * not at all because an event loop has its core, delays nobody. Which thread ran a part shows nowhere.
 *
 * `claim` holds the job's number and the next part. It is closed before the job changes, so that a worker that comes late
 * finds nothing to take, and its attempt to take what it saw before fails.
 *
 * Workers spin for a bounded time after a job (40 us: about the gap between two operations of a step) and then sleep,
 * so that an event loop on the same cores is never starved: a barrier that spins without bound beside a third runnable
 * thread turned steps of 3 ms into 106 ms. With more threads than cores there is no spinning at all.
 *
 * Sleeping is safe by the store-then-load pattern on both sides: the waiter announces itself, then looks again; the
 * waker publishes, then looks for waiters. All of these are sequentially consistent, so at least one sees the other.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define AE_SPIN_NS 40000

typedef struct {
    void *data;
    size_t bytes;
} ae_buffer;

typedef struct {
    ae_pool *pool;
    pthread_t thread;
    int number;
} ae_worker;

static _Thread_local int own_number; /* of a worker, from 1; 0 in any other thread */

struct ae_pool {
    int threads;
    long spin_ns;
    _Atomic(ae_task) task;
    _Atomic(void *) arg;
    atomic_int parts;
    _Alignas(64) atomic_uint_fast64_t claim; /* job number << 32 | next part, or AE_CLOSED */
    _Alignas(64) atomic_uint generation;     /* of the last job published */
    _Alignas(64) atomic_int pending;         /* parts that have not ended */
    _Alignas(64) atomic_int sleepers;        /* workers asleep or about to be */
    atomic_int caller_sleeps;
    atomic_int stop;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    ae_worker *workers; /* threads - 1 */
    ae_buffer scratch[AE_SCRATCH_SLOTS];
};

#define AE_CLOSED 0xffffffffu

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int usable_cores(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* Whether `*value` left `old` within the spin time. */
static int spin_while_equal(atomic_uint *value, unsigned old, long spin_ns)
{
    if (atomic_load_explicit(value, memory_order_acquire) != old) return 1;
    if (spin_ns == 0) return 0;
    int64_t end = now_ns() + spin_ns;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) != old) return 1;
            relax();
        }
        if (now_ns() > end) return 0;
    }
}

static void wait_for_job(ae_pool *p, unsigned seen)
{
    if (spin_while_equal(&p->generation, seen, p->spin_ns)) return;
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->generation) == seen) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

/* The next part of the job that is open, -1 when there is none left; where to find it in task, arg and parts. */
static int take_part(ae_pool *p, ae_task *task, void **arg, int *parts)
{
    uint_fast64_t seen = atomic_load(&p->claim);
    for (;;) {
        const uint32_t part = (uint32_t)seen;
        *task = atomic_load(&p->task);
        *arg = atomic_load(&p->arg);
        *parts = atomic_load(&p->parts);
        if (part == AE_CLOSED || (int)part >= *parts) return -1;
        if (atomic_compare_exchange_weak(&p->claim, &seen, seen + 1)) return (int)part; /* so all of these are its own */
    }
}

/* Run parts until none is left to take. */
static void run_parts(ae_pool *p)
{
    ae_task task;
    void *arg;
    int parts, part;
    while ((part = take_part(p, &task, &arg, &parts)) >= 0) {
        task(arg, part, parts);
        if (atomic_fetch_sub(&p->pending, 1) != 1 || !atomic_load(&p->caller_sleeps)) continue;
        pthread_mutex_lock(&p->lock);
        pthread_cond_signal(&p->done);
        pthread_mutex_unlock(&p->lock);
    }
}

static void *worker_main(void *self)
{
    ae_worker *w = self;
    ae_pool *p = w->pool;
    unsigned seen = 0;
    own_number = w->number;
    for (;;) {
        wait_for_job(p, seen);
        seen = atomic_load(&p->generation);
        if (atomic_load(&p->stop)) return NULL;
        run_parts(p);
    }
}

static void publish(ae_pool *p)
{
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers) == 0) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static void wait_for_workers(ae_pool *p)
{
    int64_t end = 0;
    for (int i = 0; atomic_load_explicit(&p->pending, memory_order_acquire) != 0; i++) {
        if (p->spin_ns && (i & 31) != 31) {
            relax();
            continue;
        }
        int64_t now = p->spin_ns ? now_ns() : 1;
        if (p->spin_ns && end == 0) end = now + p->spin_ns;
        if (now <= end) continue;
        pthread_mutex_lock(&p->lock);
        atomic_store(&p->caller_sleeps, 1);
        while (atomic_load(&p->pending) != 0) pthread_cond_wait(&p->done, &p->lock);
        atomic_store(&p->caller_sleeps, 0);
        pthread_mutex_unlock(&p->lock);
        return;
    }
}

void ae_pool_run(ae_pool *p, ae_task task, void *arg, int parts)
{
    if (parts <= 1 || p->threads == 1) {
        for (int i = 0; i < parts; i++) task(arg, i, parts);
    } else {
        atomic_store(&p->task, task);
        atomic_store(&p->arg, arg);
        atomic_store(&p->parts, parts);
        atomic_store(&p->pending, parts);
        const uint_fast64_t job = ((atomic_load(&p->claim) >> 32) + 1) << 32;
        atomic_store(&p->claim, job);
        publish(p);
        run_parts(p);
        atomic_store(&p->claim, job | AE_CLOSED);
        wait_for_workers(p);
    }
}

static void stop_workers(ae_pool *p, int started)
{
    atomic_store(&p->stop, 1);
    publish(p);
    for (int i = 0; i < started; i++) pthread_join(p->workers[i].thread, NULL);
}

ae_pool *ae_pool_create(int threads)
{
    if (threads < 1 || threads > AE_MAX_THREADS) return NULL;
    ae_pool *p = NULL;
    if (posix_memalign((void **)&p, 64, sizeof *p)) return NULL;
    *p = (ae_pool){.threads = threads, .claim = AE_CLOSED, .spin_ns = threads <= usable_cores() ? AE_SPIN_NS : 0};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->done, NULL);
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    if (!p->workers) {
        free(p);
        return NULL;
    }
    for (int i = 0; i < threads - 1; i++) {
        p->workers[i] = (ae_worker){.pool = p, .number = i + 1};
        if (pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i])) {
            stop_workers(p, i);
            free(p->workers);
            free(p);
            return NULL;
        }
    }
    return p;
}

void ae_pool_destroy(ae_pool *p)
{
    stop_workers(p, p->threads - 1);
    for (int i = 0; i < AE_SCRATCH_SLOTS; i++) free(p->scratch[i].data);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p->workers);
    free(p);
}

int ae_pool_thread(void) { return own_number; }

int ae_pool_threads(const ae_pool *p) { return p->threads; }

void *ae_pool_scratch(ae_pool *p, int part, size_t bytes)
{
    ae_buffer *b = &p->scratch[part];
    if (b->data && b->bytes >= bytes) return b->data; /* no bytes have a place, too: NULL says that memory is out */
    free(b->data);
    *b = (ae_buffer){0};
    size_t size = (bytes + bytes / 4) / 4096 * 4096 + 4096; /* some room, so that growth ends soon */
    if (posix_memalign(&b->data, 64, size)) b->data = NULL;
    b->bytes = b->data ? size : 0;
    return b->data;
}
