/* What the forward and the backward pass of the native KDA operator share: vectors, one matrix product, and the decay inside a tile.
 *
 * Plain C with the vector extension of GCC and Clang. A tile is C = 16 tokens of one head. All that its products read fits the first-level
 * cache, but for the state, which is 64 kB at K = V = 128 and is walked through in panels of columns.
 */
#pragma once
#include "native_call.h"
#include <string.h>

#define C 16         /* tokens in a tile */
#define GROUP 4      /* tiles between two states that are kept for the backward pass */
#define LIMIT 57.81f /* 8 steps of K3's bound -5, in powers of two, and rounding: what a dense tile's exponents may reach */

#if defined(__AVX512F__)
#define LANES 16 /* numbers in a vector register */
#define ROWS 8   /* rows of a product that are summed in registers at once, two vectors wide */
#elif defined(__AVX__)
#define LANES 8
#define ROWS 4
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 8
#else
#define LANES 4
#define ROWS 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef vec anywhere __attribute__((aligned(4), may_alias)); /* a vector at any address */

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *x) { return *(const anywhere *)x; }
INLINE void store(float *x, vec y) { *(anywhere *)x = y; }

/* c = keep from + a b:  a [rows, depth] one number at a time, b [depth, columns], c and from [rows, columns] a vector at a time. `rows` and
 * `columns` are multiples of 16. The steps say how far apart neighbours in memory are, so that a may be read transposed. keep has a factor for
 * each row; NULL is 1. from may be c itself; NULL is 0. */
void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
             float *c, int64_t c_row, const float *from, const float *keep);

/* How far apart rows of n numbers lie in scratch memory. Rows 512 bytes apart would share an eighth of the cache. */
#define WIDE(n) ((n) + 16)

/* A store for the scratch of one thread: 64-byte lines, handed out one after the other. */
INLINE float *take(float **memory, int64_t numbers) {
    float *taken = *memory;
    *memory += (numbers + 15) / 16 * 16;
    return taken;
}

void transpose(int64_t rows, int64_t columns, const float *x, int64_t x_row, float *y, int64_t y_row);

#define LOG2_E 1.4426950408889634f

/* 2^x to float32's rounding: the whole part of x goes into the exponent, exp of the rest (at most ln(2) / 2) is its series to the seventh
 * power. 0 below 2^-126. x above 127 is nobody's business here. */
INLINE vec exp2_(vec x) {
    vec shifted = x + 12582912.0f; /* 1.5 * 2^23: whole numbers are now the last bits */
    vec y = (x - (shifted - 12582912.0f)) * 0.6931471805599453f;
    vec p = 1.0f / 720 + y * (1.0f / 5040);
    p = 1.0f / 120 + y * p;
    p = 1.0f / 24 + y * p;
    p = 1.0f / 6 + y * p;
    p = 0.5f + y * p;
    p = 1.0f + y * p;
    p = 1.0f + y * p;
    return (vec)(((uvec)p + ((uvec)shifted << 23)) & (uvec)(x >= -126.0f));
}

/* What one tile's products are made of. G is the running sum of g, measured from the tile's middle. */
typedef struct {
    float *rows;    /* [2C, K] exp(G_i) k_i, then exp(G_i) q_i */
    float *fade;    /* [C, K]  exp(G_i) */
    float *columns; /* [C, K]  exp(-G_j) k_j */
    float *across;  /* [K, C]  columns, transposed */
    float *in;      /* [2C, K] -k_i, then q_i, faded since the tile began */
    float *writes;  /* [C, K]  beta_j k_j, as faded as it will be at the tile's end */
    float *into;    /* [K]     decay from the tile's start to its middle, */
    float *out_of;  /* [K]     from there to its end, */
    float *keep;    /* [K]     and over all of it: what it leaves of the state */
    float *beta;    /* [C] */
    float *AP;      /* [2C, C] A, then P: what the tokens of the tile have to do with each other */
    float *inverse; /* [C, C]  (I + A diag(beta))^-1; the reports' M is diag(beta) times it */
    float *own;     /* [C, C]  P diag(beta) */
} Tile;

#define TILE_SIZE(K) (8 * C * WIDE(K) + 3 * (K) + C + 4 * C * C)

INLINE Tile new_tile(float **memory, int64_t K) {
    Tile t;
    int64_t rows = C * WIDE(K);
    t.rows = take(memory, 2 * rows), t.in = take(memory, 2 * rows), t.fade = take(memory, rows), t.columns = take(memory, rows);
    t.across = take(memory, C * K), t.writes = take(memory, rows), t.beta = take(memory, C);
    t.into = take(memory, K), t.out_of = take(memory, K), t.keep = take(memory, K);
    t.AP = take(memory, 2 * C * C), t.inverse = take(memory, C * C), t.own = take(memory, C * C);
    return t;
}

extern const float ZEROS[256];

INLINE float *row_of(Rows x, int64_t token, int64_t head) { return x.at + token * x.token + head * x.head; }

/* The first `n` tokens of a tile that begins at `token`; rows after the last token are zeros: they neither fade nor write. */
INLINE void find(const float *found[C], Rows x, int64_t token, int64_t head, int64_t n) {
    for (int64_t i = 0; i < C; i++) found[i] = i < n ? row_of(x, token + i, head) : ZEROS;
}

/* Ask for a row ahead of its reading or writing: a head's rows lie far apart, and the processor does not guess where the next one is. It
 * comes as far as the second-level cache. The first could not hold all that is asked for, and has few requests to spare: to fetch into it
 * took as long as it saved. */
INLINE void fetch(Rows x, int64_t token, int64_t head, int64_t channels) {
    for (int64_t at = 0; at < channels; at += 16) __builtin_prefetch(row_of(x, token, head) + at, 0, 2);
}

/* One of `parts` parts of the inputs of the tile that begins at `token`; of its values or, on the way back, its errors. Little at a time:
 * with more requests than it can keep the processor waits, and drops some. */
INLINE void fetch_inputs(const Call *c, Rows values, int64_t token, int64_t end, int64_t head, int64_t part, int64_t parts) {
    for (int64_t i = token + C * part / parts; i < token + C * (part + 1) / parts && i < end; i++) {
        fetch(c->q, i, head, c->K), fetch(c->k, i, head, c->K);
        fetch(c->g, i, head, c->K), fetch(values, i, head, c->V);
    }
}

int decay(const Call *c, int64_t token, int64_t head, int64_t n, Tile t);
void within(int64_t K, Tile t);
void token_by_token(const Call *c, int64_t token, int64_t head, int64_t n, float *S, float *e, float *o);

INLINE void copy_rows(int64_t rows, int64_t columns, const float *x, int64_t x_row, float *y, int64_t y_row) {
    for (int64_t i = 0; i < rows; i++) memcpy(y + i * y_row, x + i * x_row, columns * sizeof(float));
}

