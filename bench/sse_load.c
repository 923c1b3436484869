/* Thousands of SSE clients in one thread: the load for bench/overlap.py and bench/soak.py.
 *
 * Owns: N connections over epoll, HTTP/1.1 with chunked answers, the events in them; times and checks.
 * Does not know: what the server is; it sends plain completions of token ids and reads token ids back.
 * Invariants: every answer has exactly the tokens that its usage says, or counts as failed; the digest depends on each
 * stream's tokens in their order and on nothing else, so two servers that compute the same give the same digest.
 *
 * cc -O2 -o sse_load sse_load.c
 * sse_load PORT CLIENTS REQUESTS_PER_CLIENT PROMPT_TOKENS MAX_TOKENS RAMP_MS VOCAB SHARED_TOKENS [EXTRA_JSON]
 * SHARED_TOKENS of each prompt are the same for all. EXTRA_JSON (",\"seed\":1") goes into every body. Prints one JSON line; exits 1 when an answer failed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS = 2048, ROOM = 1 << 16 };
#define GROWTH 1.01 /* of the histogram's buckets; the first ends at 10 us, the last beyond two hours */

enum state { IDLE, CONNECTING, SENDING, HEAD, BODY };

struct client {
    int fd, index, request;
    enum state state;
    char *out, *in; /* the request; the undecoded rest of the answer */
    size_t out_size, out_done, in_size, in_room;
    char *event; /* the unfinished event */
    size_t event_size, event_room;
    long chunk_left; /* bytes of the current chunk; -1: a size line comes, -2: the chunk's line end comes */
    int status, tokens, usage, done;
    double sent_s, first_s, last_s;
    uint64_t digest;
};

struct histogram {
    uint64_t count[BUCKETS], total;
    double largest_s;
};

static struct {
    int port, clients, requests, prompt, max_tokens, ramp_ms, vocab, shared;
    const char *extra;
} want;
static struct histogram itl, steady, ttft, e2e;
static uint64_t tokens, chunks, single, failed, answered, digest;
static int open_streams, streaming, was_full;
static double full_since_s, full_s, began_s, first_token_s;
static char first_failure[400];
static int poller;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double bucket_end(int i) {
    double end = 1e-5;
    while (i-- > 0) end *= GROWTH;
    return end;
}

static double ends[BUCKETS];

static void note(struct histogram *h, double s) {
    int low = 0, high = BUCKETS - 1;
    while (low < high) {
        int mid = (low + high) / 2;
        if (ends[mid] < s) low = mid + 1;
        else high = mid;
    }
    h->count[low]++;
    h->total++;
    if (s > h->largest_s) h->largest_s = s;
}

static double quantile_ms(const struct histogram *h, double q) {
    uint64_t rank = (uint64_t)(q * (double)h->total), seen = 0;
    for (int i = 0; i < BUCKETS; i++) {
        seen += h->count[i];
        if (seen > rank) return 1e3 * (ends[i] < h->largest_s ? ends[i] : h->largest_s);
    }
    return 1e3 * h->largest_s;
}

static uint64_t mix(uint64_t x) { /* splitmix64's finaliser */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void *grown(void *old, size_t *room, size_t need) {
    if (need <= *room) return old;
    while (*room < need) *room = *room ? 2 * *room : 4096;
    void *made = realloc(old, *room);
    if (!made) {
        fprintf(stderr, "out of memory at %zu bytes\n", *room);
        exit(2);
    }
    return made;
}

static void make_request(struct client *c) {
    size_t room = 1024 + strlen(want.extra) + 12 * (size_t)want.prompt;
    char *body = malloc(room);
    size_t n = (size_t)sprintf(body, "{\"prompt\":[");
    for (int i = 0; i < want.prompt; i++) {
        uint64_t who = i < want.shared ? 0 : 1 + (uint64_t)c->index + ((uint64_t)c->request << 32);
        /* the first hundred ids are left alone: special tokens live there */
        uint64_t id = 100 + mix(who * 1000003u + (uint64_t)i) % (uint64_t)(want.vocab - 100);
        n += (size_t)sprintf(body + n, i ? ",%d" : "%d", (int)id);
    }
    n += (size_t)sprintf(body + n,
                         "],\"max_tokens\":%d,\"temperature\":0,\"ignore_eos\":true,\"stream\":true,\"return_token_ids\":true,"
                         "\"stream_options\":{\"include_usage\":true}%s}",
                         want.max_tokens, want.extra);
    free(c->out);
    c->out = malloc(n + 512);
    int head = sprintf(c->out,
                       "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
                       "Content-Length: %zu\r\n\r\n",
                       want.port, n);
    memcpy(c->out + head, body, n);
    c->out_size = (size_t)head + n;
    c->out_done = 0;
    free(body);
}

static void watch(struct client *c, uint32_t events, int op) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(poller, op, c->fd, &event)) {
        perror("epoll_ctl");
        exit(2);
    }
}

static void reset(struct client *c) {
    c->in_size = c->event_size = 0;
    c->chunk_left = -1;
    c->status = c->tokens = c->usage = c->done = 0;
    c->first_s = 0;
    c->digest = mix((uint64_t)c->index + ((uint64_t)c->request << 32));
}

static void start(struct client *c) {
    reset(c);
    make_request(c);
    c->sent_s = now_s();
    if (c->fd < 0) {
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)want.port)};
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (c->fd < 0 || (connect(c->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS)) {
            perror("connect");
            exit(2);
        }
        int one = 1;
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        watch(c, EPOLLOUT, EPOLL_CTL_ADD);
    } else {
        watch(c, EPOLLOUT, EPOLL_CTL_MOD);
    }
    c->state = SENDING;
    open_streams++;
}

/* All clients stream at once between the last one's first token and the first one's end. */
static void count_streaming(int change) {
    streaming += change;
    int full = streaming == want.clients;
    if (full && !was_full) full_since_s = now_s();
    if (!full && was_full) full_s += now_s() - full_since_s;
    was_full = full;
}

static void finish(struct client *c, const char *fault) {
    open_streams--;
    if (c->first_s > 0) count_streaming(-1);
    if (!fault && (c->status != 200 || !c->done)) fault = "the answer ended before [DONE]";
    if (!fault && (c->tokens != c->usage || c->tokens != want.max_tokens)) fault = "tokens are missing";
    if (fault) {
        if (!failed)
            snprintf(first_failure, sizeof first_failure, "client %d request %d: %s (status %d, %d tokens, usage %d)",
                     c->index, c->request, fault, c->status, c->tokens, c->usage);
        failed++;
        close(c->fd);
        c->fd = -1;
    } else {
        answered++;
        digest ^= c->digest;
        note(&e2e, now_s() - c->sent_s);
    }
    c->state = IDLE;
    if (++c->request < want.requests) start(c);
    else if (c->fd >= 0) {
        close(c->fd);
        c->fd = -1;
    }
}

static void take_event(struct client *c, const char *event, double at_s) {
    if (strncmp(event, "data: ", 6)) return;
    if (!strncmp(event + 6, "[DONE]", 6)) {
        c->done = 1;
        return;
    }
    const char *usage = strstr(event, "\"completion_tokens\":");
    if (usage) c->usage = atoi(usage + 20);
    const char *ids = strstr(event, "\"token_ids\":[");
    const char *prompt = strstr(event, "\"prompt_token_ids\":[");
    if (prompt && ids == prompt + 8) ids = strstr(ids + 13, "\"token_ids\":[");
    if (!ids || ids[13] == ']') return;
    int n = 0;
    for (const char *p = ids + 12; *p && *p != ']';) {
        c->digest = mix(c->digest ^ (uint64_t)strtol(p + 1, (char **)&p, 10));
        n++;
    }
    chunks++;
    single += n == 1;
    tokens += (uint64_t)n;
    if (!c->tokens) {
        c->first_s = at_s;
        if (first_token_s == 0) first_token_s = at_s;
        note(&ttft, at_s - c->sent_s);
        count_streaming(1);
    } else {
        note(&itl, at_s - c->last_s);
        if (was_full) note(&steady, at_s - c->last_s);
    }
    c->tokens += n;
    c->last_s = at_s;
}

static void take_body(struct client *c, const char *data, size_t size, double at_s) {
    c->event = grown(c->event, &c->event_room, c->event_size + size + 1);
    memcpy(c->event + c->event_size, data, size);
    c->event_size += size;
    c->event[c->event_size] = 0;
    char *from = c->event, *end;
    while ((end = strstr(from, "\n\n"))) {
        *end = 0;
        take_event(c, from, at_s);
        from = end + 2;
    }
    c->event_size -= (size_t)(from - c->event);
    memmove(c->event, from, c->event_size + 1);
}

/* 1: the answer is complete; 0: more must come. */
static int take_input(struct client *c, double at_s) {
    char *p = c->in, *end = c->in + c->in_size;
    if (c->state == HEAD) {
        *end = 0;
        char *blank = strstr(c->in, "\r\n\r\n");
        if (!blank) return 0;
        c->status = atoi(c->in + 9);
        p = blank + 4;
        c->state = BODY;
    }
    int complete = 0;
    while (p < end && !complete) {
        if (c->chunk_left == -2) {
            if (end - p < 2) break;
            p += 2;
            c->chunk_left = -1;
        } else if (c->chunk_left == -1) {
            char *line = memchr(p, '\n', (size_t)(end - p));
            if (!line) break;
            c->chunk_left = strtol(p, NULL, 16);
            if (c->chunk_left == 0) complete = 1;
            p = line + 1;
        } else {
            size_t n = (size_t)(end - p) < (size_t)c->chunk_left ? (size_t)(end - p) : (size_t)c->chunk_left;
            take_body(c, p, n, at_s);
            p += n;
            c->chunk_left -= (long)n;
            if (c->chunk_left == 0) c->chunk_left = -2;
        }
    }
    c->in_size = (size_t)(end - p);
    memmove(c->in, p, c->in_size);
    return complete;
}

static void on_event(struct client *c, uint32_t events) {
    if (c->state == IDLE) return;
    if (c->state == SENDING && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
        ssize_t n = send(c->fd, c->out + c->out_done, c->out_size - c->out_done, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return finish(c, strerror(errno));
        if (n > 0) c->out_done += (size_t)n;
        if (c->out_done == c->out_size) {
            c->state = HEAD;
            watch(c, EPOLLIN, EPOLL_CTL_MOD);
        }
        return;
    }
    for (;;) {
        c->in = grown(c->in, &c->in_room, c->in_size + ROOM + 1);
        ssize_t n = recv(c->fd, c->in + c->in_size, ROOM, 0);
        if (n < 0) {
            if (errno != EAGAIN) finish(c, strerror(errno));
            return;
        }
        if (n == 0) return finish(c, "the server closed the connection");
        c->in_size += (size_t)n;
        double at_s = now_s();
        if (c->status && c->status != 200) return finish(c, "an error status");
        if (take_input(c, at_s)) return finish(c, NULL);
        if (c->status && c->status != 200) return finish(c, "an error status");
        if (n < ROOM) return;
    }
}

int main(int argc, char **argv) {
    if (argc < 9) {
        fprintf(stderr, "usage: sse_load PORT CLIENTS REQUESTS PROMPT_TOKENS MAX_TOKENS RAMP_MS VOCAB SHARED [EXTRA]\n");
        return 2;
    }
    int *field[] = {&want.port, &want.clients, &want.requests, &want.prompt, &want.max_tokens, &want.ramp_ms, &want.vocab, &want.shared};
    for (int i = 0; i < 8; i++) *field[i] = atoi(argv[i + 1]);
    want.extra = argc > 9 ? argv[9] : "";
    for (int i = 0; i < BUCKETS; i++) ends[i] = bucket_end(i);
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    poller = epoll_create1(0);
    struct client *clients = calloc((size_t)want.clients, sizeof *clients);
    struct epoll_event *events = calloc(1024, sizeof *events);
    began_s = now_s();
    int started = 0;
    while (started < want.clients || open_streams) {
        double due = began_s + 1e-3 * want.ramp_ms * started / want.clients;
        while (started < want.clients && now_s() >= due) {
            clients[started].index = started;
            clients[started].fd = -1;
            start(&clients[started++]);
            due = began_s + 1e-3 * want.ramp_ms * started / want.clients;
        }
        int wait_ms = started < want.clients ? 1 : 1000;
        int n = epoll_wait(poller, events, 1024, wait_ms);
        for (int i = 0; i < n; i++) on_event(events[i].data.ptr, events[i].events);
    }
    double seconds = now_s() - began_s;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + 1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    printf("{\"clients\":%d,\"answered\":%lu,\"failed\":%lu,\"tokens\":%lu,\"seconds\":%.3f,\"tokens_per_s\":%.0f,"
           "\"ttft_ms\":{\"p50\":%.2f,\"p99\":%.2f},\"itl_ms\":{\"p50\":%.2f,\"p99\":%.2f,\"max\":%.2f},"
           "\"steady\":{\"seconds\":%.2f,\"gaps\":%lu,\"itl_p50_ms\":%.2f,\"itl_p99_ms\":%.2f,\"itl_max_ms\":%.2f},"
           "\"e2e_ms\":{\"p50\":%.1f,\"p99\":%.1f},\"single_token_chunks\":%.4f,\"digest\":\"%016lx\",\"client_cpu_s\":%.2f,"
           "\"first_failure\":\"%s\"}\n",
           want.clients, answered, failed, tokens, seconds, (double)tokens / seconds, quantile_ms(&ttft, 0.5),
           quantile_ms(&ttft, 0.99), quantile_ms(&itl, 0.5), quantile_ms(&itl, 0.99), 1e3 * itl.largest_s, full_s,
           steady.total, quantile_ms(&steady, 0.5), quantile_ms(&steady, 0.99), 1e3 * steady.largest_s,
           quantile_ms(&e2e, 0.5), quantile_ms(&e2e, 0.99), chunks ? (double)single / (double)chunks : 0.0, digest, cpu_s,
           first_failure);
    return failed != 0;
}
