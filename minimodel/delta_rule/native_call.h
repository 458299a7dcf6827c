/* What Python passes (native.py has the same structures) and what the files offer each other. */
#pragma once
#include <stdint.h>

/* One argument [tokens, heads, channels] of the caller: channels are neighbours, the rest is strided. */
typedef struct {
    float *at;
    int64_t token, head;
} Rows;

typedef struct {
    int64_t documents, heads, K, V;
    const int64_t *bounds;     /* [documents + 1] where each begins, in tokens */
    const int64_t *first_kept; /* [documents] its first kept state */
    float scale;
    Rows q, k, v, g, beta;     /* K, K, V, K and 1 channels */
    const float *S_first;      /* [documents, heads, K, V] */
    float *S_last;             /* the same */
    Rows o;                    /* V channels */
    float *kept;               /* [states, heads, K, V], one every GROUP tiles; NULL when no backward pass will come */
    Rows E;                    /* V channels: every token's error, kept with the states */
    int64_t next;              /* the next sequence, document * heads + head, that no thread has taken */
    int64_t failed;            /* 1 when there was no memory */
} Call;

typedef struct {
    Call call;
    Rows dO, dq, dk, dv, dg, dbeta;
    const float *dS_last; /* [documents, heads, K, V] */
    float *dS_first;
} Gradients;

/* Numbers of scratch memory that a thread needs, and one head of one document. */
int64_t kda_forward_memory(int64_t K, int64_t V);
int64_t kda_backward_memory(int64_t K, int64_t V);
void kda_forward_sequence(const Call *call, int64_t document, int64_t head, float *memory);
void kda_backward_sequence(const Gradients *call, int64_t document, int64_t head, float *memory);
