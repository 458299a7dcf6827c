/* What the tokens of one tile do to each other, and the equation itself for tiles that are too steep for products. */
#include "native_tile.h"

/* Measure a tile's decay and scale its keys and queries with it. Returns 0 when an exponent leaves the dense form's range. */
int decay(const Call *c, int64_t token, int64_t head, int64_t n, Tile t) {
    const float *q[C], *k[C], *g[C], *b[C];
    int64_t K = c->K, K_row = WIDE(K);
    find(q, c->q, token, head, n), find(k, c->k, token, head, n), find(g, c->g, token, head, n), find(b, c->beta, token, head, n);
    for (int i = 0; i < C; i++) t.beta[i] = *b[i];
    ivec dense = (vec){0} == (vec){0};
    for (int64_t at = 0; at < K; at += LANES) {
        vec G[C], step[C];
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) step[i] = load(g[i] + at) * LOG2_E;
        G[C / 2 - 1] = (vec){0};
#pragma GCC unroll 16
        for (int i = C / 2; i < C; i++) G[i] = G[i - 1] + step[i];
#pragma GCC unroll 16
        for (int i = C / 2 - 2; i >= 0; i--) G[i] = G[i + 1] - step[i + 1];
        vec head_ = step[0] - G[0], tail = G[C - 1];
        dense &= (head_ >= -LIMIT) & (tail >= -LIMIT); /* sums of negative numbers: all others lie between */
        vec into = exp2_(head_), out_of = exp2_(tail);
        store(t.into + at, into), store(t.out_of + at, out_of), store(t.keep + at, exp2_(head_ + tail));
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) {
            vec row = exp2_(G[i]), k_ = load(k[i] + at), q_ = load(q[i] + at) * c->scale;
            vec column = k_ / row, k_row = row * k_, q_row = row * q_;
            store(t.fade + i * K_row + at, row);
            store(t.rows + i * K_row + at, k_row);
            store(t.rows + (C + i) * K_row + at, q_row);
            store(t.columns + i * K_row + at, column);
            store(t.in + i * K_row + at, -into * k_row);
            store(t.in + (C + i) * K_row + at, into * q_row);
            store(t.writes + i * K_row + at, out_of * t.beta[i] * column);
        }
    }
    for (int i = 0; i < LANES; i++)
        if (!dense[i]) return 0;
    return 1;
}

/* A, P, the inverse and P diag(beta) of a dense tile:
 *     A[i,j] = sum_c k_i[c] k_j[c] exp(G_i[c] - G_j[c])   j < i        P[i,j] = sum_c q_i[c] k_j[c] exp(G_i[c] - G_j[c])   j <= i
 */
void within(int64_t K, Tile t) {
    transpose(C, K, t.columns, WIDE(K), t.across, C);
    product(2 * C, C, K, t.rows, WIDE(K), 1, t.across, C, t.AP, C, NULL, NULL);
    for (int i = 0; i < C; i++)
        for (int j = 0; j < C; j++) {
            if (j >= i) t.AP[i * C + j] = 0;
            if (j > i) t.AP[(C + i) * C + j] = 0;
            t.own[i * C + j] = t.AP[(C + i) * C + j] * t.beta[j];
            t.inverse[i * C + j] = i == j;
        }
    for (int j = 0; j < C; j++) /* once row j of the inverse is ready, all later ones lose their share of it */
        for (int i = j + 1; i < C; i++) {
            float x = t.AP[i * C + j] * t.beta[j];
            for (int m = 0; m < C; m++) t.inverse[i * C + m] -= x * t.inverse[j * C + m];
        }
}

/* One token after the other, the equation itself: right for any decay. S [K, V], e and o [n, V], rows V_row apart.
 *     S = Diag(exp(g)) S    e = v - S^T k    S = S + k (beta e)^T    o = S^T (scale q)
 */
void token_by_token(const Call *c, int64_t token, int64_t head, int64_t n, float *S, float *e, float *o) {
    const float *q[C], *k[C], *v[C], *g[C], *b[C];
    int64_t K = c->K, V = c->V, V_row = WIDE(V);
    float alpha[256];
    find(q, c->q, token, head, n), find(k, c->k, token, head, n), find(v, c->v, token, head, n);
    find(g, c->g, token, head, n), find(b, c->beta, token, head, n);
    for (int64_t i = 0; i < n; i++) {
        float *e_ = e + i * V_row, *o_ = o + i * V_row;
        for (int64_t at = 0; at < K; at += LANES) store(alpha + at, exp2_(load(g[i] + at) * LOG2_E));
        for (int64_t at = 0; at < V; at += LANES) {
            vec error = load(v[i] + at), out = {0};
            for (int64_t m = 0; m < K; m++) {
                vec faded = alpha[m] * load(S + m * V_row + at);
                store(S + m * V_row + at, faded);
                error -= k[i][m] * faded;
            }
            store(e_ + at, error);
            for (int64_t m = 0; m < K; m++) {
                vec written = load(S + m * V_row + at) + k[i][m] * (*b[i] * error);
                store(S + m * V_row + at, written);
                out += q[i][m] * written;
            }
            store(o_ + at, out * c->scale);
        }
    }
}
