/* The forward pass of KDA for one head of one document, tile after tile (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4).
 *
 *     E  = M (V - (exp(G) K) S)                               M = (I + A diag(beta))^-1
 *     O  = (exp(G) Q) S + P diag(beta) E
 *     S' = Diag(exp(G_C)) S + (exp(G_C - G) K)^T diag(beta) E
 */
#include "native_tile.h"

/* One token after the other, the equation itself: right for any decay. S [K, V] with rows S_row apart; e and o [n, V].
 *     S = Diag(exp(g)) S    e = v - S^T k    S = S + k (beta e)^T    o = S^T (scale q)
 */
static void token_by_token(const Call *c, int64_t token, int64_t head, int64_t n, float *S, int64_t S_row, float *e, float *o) {
    const float *q[C], *k[C], *v[C], *g[C], *b[C];
    int64_t K = c->K, V = c->V;
    float alpha[256];
    find(q, c->q, token, head, n), find(k, c->k, token, head, n), find(v, c->v, token, head, n);
    find(g, c->g, token, head, n), find(b, c->beta, token, head, n);
    for (int64_t i = 0; i < n; i++) {
        float *e_ = e + i * V, *o_ = o + i * V;
        for (int64_t at = 0; at < K; at += LANES) store(alpha + at, exp2_(load(g[i] + at) * LOG2_E));
        for (int64_t at = 0; at < V; at += LANES) {
            vec error = load(v[i] + at), out = {0};
            for (int64_t m = 0; m < K; m++) {
                vec faded = alpha[m] * load(S + m * S_row + at);
                store(S + m * S_row + at, faded);
                error -= k[i][m] * faded;
            }
            store(e_ + at, error);
            for (int64_t m = 0; m < K; m++) {
                vec written = load(S + m * S_row + at) + k[i][m] * (*b[i] * error);
                store(S + m * S_row + at, written);
                out += q[i][m] * written;
            }
            store(o_ + at, out * c->scale);
        }
    }
}

int64_t kda_forward_memory(int64_t K, int64_t V) { return K * (V + 16) + TILE_SIZE(K) + 3 * C * V; }

void kda_forward_sequence(const Call *c, int64_t document, int64_t head, float *memory) {
    int64_t K = c->K, V = c->V, S_row = V + 16; /* not V: rows 512 bytes apart would fall on a quarter of the cache */
    int64_t first = c->bounds[document], T = c->bounds[document + 1] - first, state = document * c->heads + head;
    float *S = take(&memory, K * S_row), *YO = take(&memory, 2 * C * V), *E = take(&memory, C * V);
    Tile t = new_tile(&memory, K);
    copy_rows(K, V, c->S_first + state * K * V, V, S, S_row);
    for (int64_t start = 0; start < T; start += C) {
        int64_t n = T - start < C ? T - start : C, token = first + start;
        if (c->kept && start % (GROUP * C) == 0)
            copy_rows(K, V, S, S_row, c->kept + ((c->first_kept[document] + start / (GROUP * C)) * c->heads + head) * K * V, V);
        float *O = YO + C * V;
        if (decay(c, token, head, n, t)) {
            within(K, t);
            const float *v[C];
            find(v, c->v, token, head, n);
            for (int i = 0; i < C; i++) memcpy(YO + i * V, v[i], V * sizeof(float));
            memset(O, 0, C * V * sizeof(float));
            for (int64_t at = 0; at < V; at += 2 * LANES) { /* a panel of S stays in the cache for all it takes part in */
                int64_t width = V - at < 2 * LANES ? V - at : 2 * LANES;
                product(2 * C, width, K, t.in, K, 1, S + at, S_row, YO + at, V, ITSELF);
                product(C, width, C, t.M, C, 1, YO + at, V, E + at, V, NOTHING);
                product(C, width, C, t.own, C, 1, E + at, V, O + at, V, ITSELF);
                product(K, width, C, t.writes, 1, K, E + at, V, S + at, S_row, t.keep);
            }
        } else
            token_by_token(c, token, head, n, S, S_row, E, O);
        copy_rows(n, V, O, V, c->o.at + token * c->o.token + head * c->o.head, c->o.token);
        if (c->kept) copy_rows(n, V, E, V, c->e.at + token * c->e.token + head * c->e.head, c->e.token);
    }
    copy_rows(K, V, S, S_row, c->S_last + state * K * V, V);
}
