/* Shares sequences, one head of one document each, out among threads. One thread computes a sequence from beginning to end, so that results
 * don't depend on how many threads there are.
 *
 * The threads are those of torch, whose OpenMP offers GOMP_parallel (``team``). After an operation of torch they go on waiting for the next one at
 * full speed for a while, so that threads of our own would have to share the cores with them. Without a team we start some for the call. */
#include "native_call.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

static void work(Call *c, int backward) {
    int64_t numbers = (backward ? kda_backward_memory : kda_forward_memory)(c->K, c->V), n;
    void *memory;
    if (posix_memalign(&memory, 64, numbers * sizeof(float))) {
        __atomic_store_n(&c->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    while ((n = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->documents * c->heads) {
        if (backward) kda_backward_sequence((Gradients *)c, n / c->heads, n % c->heads, memory);
        else kda_forward_sequence(c, n / c->heads, n % c->heads, memory);
    }
    free(memory);
}

static void forward(void *call) { work(call, 0); }
static void backward(void *call) { work(call, 1); }

typedef void Team(void (*pass)(void *), void *call, unsigned threads, unsigned flags);
typedef struct {
    void (*pass)(void *);
    void *call;
} Task;

static void *one(void *task) { return ((Task *)task)->pass(((Task *)task)->call), NULL; }

static int64_t run(void (*pass)(void *), void *call, int64_t threads, Team *team) {
    if (team && threads > 1) team(pass, call, threads, 0);
    else {
        Task task = {pass, call};
        pthread_t others[64];
        int64_t started = 0;
        while (started < threads - 1 && started < 64 && !pthread_create(&others[started], NULL, one, &task)) started++;
        pass(call);
        while (started) pthread_join(others[--started], NULL);
    }
    return ((Call *)call)->failed;
}

/* Fresh memory comes in pages of 4 kB, each cleared at its first touch, which takes as long as some of the passes. Ask for pages of 2 MB. */
static void in_large_pages(float *memory, int64_t numbers) {
#ifdef MADV_HUGEPAGE
    uintptr_t large = 1 << 21, start = ((uintptr_t)memory + large - 1) / large * large, end = (uintptr_t)(memory + numbers) / large * large;
    if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE); /* where it is refused, pages stay small */
#else
    (void)memory, (void)numbers;
#endif
}

/* What Python calls. Return 0, or 1 when there was no memory. All other names stay inside the library. */
#define EXPORTED __attribute__((visibility("default")))
EXPORTED void kda_in_large_pages(float *memory, int64_t numbers) { in_large_pages(memory, numbers); }
EXPORTED int64_t kda_forward(Call *call, int64_t threads, Team *team) { return run(forward, call, threads, team); }
EXPORTED int64_t kda_backward(Gradients *call, int64_t threads, Team *team) { return run(backward, call, threads, team); }
