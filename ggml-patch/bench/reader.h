#pragma once

// How fast threads read memory, the limit of products whose weights are out of the caches: loads of whole cache lines in
// a few ways, from one place on or from several side by side, with software prefetch and without. The best way counts.

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LINE_BYTES 64
#define UNROLLED   8  // lines loaded in a turn, each with a sum of its own

typedef uint64_t line __attribute__((vector_size(LINE_BYTES)));

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

// A way to read: from so many places side by side, a line asked for so many lines before its turn, 0 for never.
struct way {
    int    places;
    size_t ahead;
};

static const struct way WAYS[] = {
    { 1, 0 }, { 1, 16 }, { 1, 64 }, { 2, 0 }, { 2, 16 }, { 2, 64 },
    { 4, 0 }, { 4, 16 }, { 4, 64 }, { 8, 0 }, { 8, 16 }, { 8, 64 },
};

#define N_WAYS ((int) (sizeof(WAYS) / sizeof(WAYS[0])))

struct reader {
    const line * data;
    size_t       lines;  // a multiple of UNROLLED squared: of UNROLLED in each of up to UNROLLED places
    int          passes;
    struct way   way;
    line         sum;
};

// `places` is a constant, so that the compiler unrolls.
static inline __attribute__((always_inline)) void read_places(struct reader * r, int places, size_t ahead) {
    line         sums[UNROLLED] = { 0 };
    const size_t part           = r->lines / (size_t) places;
    const int    each           = UNROLLED / places;
    for (size_t i = 0; i < part; i += (size_t) each) {
        for (int p = 0; p < places; ++p) {
            for (int j = 0; j < each; ++j) {
                const line * at = r->data + (size_t) p * part + i + (size_t) j;
                if (ahead) {
                    __builtin_prefetch((const char *) at + ahead * LINE_BYTES, 0, 3);
                }
                sums[p * each + j] ^= *at;
            }
        }
    }
    for (int j = 0; j < UNROLLED; ++j) {
        r->sum ^= sums[j];
    }
}

static inline __attribute__((always_inline)) void read_ahead_or_not(struct reader * r, int places) {
    if (r->way.ahead) {
        read_places(r, places, r->way.ahead);
    } else {
        read_places(r, places, 0);
    }
}

static void * read_all(void * argument) {
    struct reader * r = (struct reader *) argument;
    for (int pass = 0; pass < r->passes; ++pass) {
        switch (r->way.places) {
            case 1:
                read_ahead_or_not(r, 1);
                break;
            case 2:
                read_ahead_or_not(r, 2);
                break;
            case 4:
                read_ahead_or_not(r, 4);
                break;
            default:
                read_ahead_or_not(r, 8);
                break;
        }
        __asm__ volatile("" : : "r"(&r->sum) : "memory");  // or two passes cancel out, and none is made
    }
    return NULL;
}

// GB/s of `threads` threads that read `size` bytes together, an equal part each.
static double read_speed(const void * data, size_t size, int threads, struct way way) {
    const uintptr_t from   = ((uintptr_t) data + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    const size_t    whole  = ((uintptr_t) data + size - from) / LINE_BYTES;
    const size_t    grain  = UNROLLED * UNROLLED;
    const size_t    lines  = whole / (size_t) threads / grain * grain;
    const int       passes = 1 + threads / 4;  // the time that threads take to start is small against them
    struct reader * r      = (struct reader *) aligned_alloc(LINE_BYTES, (size_t) threads * sizeof(*r));
    pthread_t *     id     = (pthread_t *) calloc((size_t) threads, sizeof(*id));
    if (!r || !id) {
        fprintf(stderr, "error: out of memory\n");
        exit(1);
    }
    for (int t = 0; t < threads; ++t) {
        const line * part = (const line *) from + (size_t) t * lines;
        r[t]              = (struct reader) { .data = part, .lines = lines, .passes = passes, .way = way };
    }
    const double start = now();
    for (int t = 1; t < threads; ++t) {
        if (pthread_create(&id[t], NULL, read_all, &r[t])) {
            fprintf(stderr, "error: a thread cannot be started\n");
            exit(1);
        }
    }
    read_all(&r[0]);
    for (int t = 1; t < threads; ++t) {
        pthread_join(id[t], NULL);
    }
    const double speed = (double) (lines * LINE_BYTES) * threads * passes / (now() - start) * 1e-9;
    free(id);
    free(r);
    return speed;
}

// The way that is the fastest, each tried twice.
static struct way best_way(const void * data, size_t size, int threads) {
    int    best  = 0;
    double speed = 0.0;
    for (int i = 0; i < 2 * N_WAYS; ++i) {
        const double found = read_speed(data, size, threads, WAYS[i % N_WAYS]);
        if (found > speed) {
            speed = found;
            best  = i % N_WAYS;
        }
    }
    return WAYS[best];
}
