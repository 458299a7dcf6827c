/* The forward pass of KDA for one head of one document, tile after tile (Kimi Linear report Eq. 6-9, K3 report Eq. 3-4). Letters
 * are those of chunkwise.py, with beta on the other side of the inverse: the reports' M is diag(beta) inverse, and X is diag(beta) E.
 *
 *     E  = inverse (V - (exp(G) K) S)                         inverse = (I + A diag(beta))^-1
 *     O  = (exp(G) Q) S + P diag(beta) E
 *     S' = Diag(exp(G_C)) S + (exp(G_C - G) K)^T diag(beta) E
 */
#include "native_tile.h"

int64_t kda_forward_memory(int64_t K, int64_t V) { return K * WIDE(V) + TILE_SIZE(K) + 3 * C * WIDE(V); }

/* One of `parts` parts of where a tile's results go. */
INLINE void fetch_outputs(const Call *c, int64_t token, int64_t n, int64_t head, int64_t part, int64_t parts) {
    for (int64_t i = C * part / parts; i < C * (part + 1) / parts && i < n; i++) {
        fetch(c->o, token + i, head, c->V);
        if (c->kept) fetch(c->E, token + i, head, c->V);
    }
}

void kda_forward_sequence(const Call *c, int64_t document, int64_t head, float *memory) {
    int64_t K = c->K, V = c->V, K_row = WIDE(K), V_row = WIDE(V), panels = (V + 2 * LANES - 1) / (2 * LANES);
    int64_t first = c->bounds[document], T = c->bounds[document + 1] - first, state = document * c->heads + head;
    float *S = take(&memory, K * V_row), *YO = take(&memory, 2 * C * V_row), *E = take(&memory, C * V_row);
    Tile t = new_tile(&memory, K);
    copy_rows(K, V, c->S_first + state * K * V, V, S, V_row);
    for (int64_t start = 0; start < T; start += C) {
        int64_t n = T - start < C ? T - start : C, token = first + start;
        if (c->kept && start % (GROUP * C) == 0)
            copy_rows(K, V, S, V_row, c->kept + ((c->first_kept[document] + start / (GROUP * C)) * c->heads + head) * K * V, V);
        float *O = YO + C * V_row;
        if (decay(c, token, head, n, t)) {
            within(K, t);
            const float *v[C];
            find(v, c->v, token, head, n);
            for (int i = 0; i < C; i++) memcpy(YO + i * V_row, v[i], V * sizeof(float));
            memset(O, 0, C * V_row * sizeof(float));
            for (int64_t at = 0; at < V; at += 2 * LANES) { /* a panel of S stays in the cache for all it takes part in */
                int64_t width = V - at < 2 * LANES ? V - at : 2 * LANES;
                int64_t next = token + C, part = 4 * (at / (2 * LANES)), parts = 4 * panels;
                fetch_outputs(c, token, n, head, part / 4, panels);
                fetch_inputs(c, c->v, next, first + T, head, part, parts);
                product(2 * C, width, K, t.in, K_row, 1, S + at, V_row, YO + at, V_row, YO + at, NULL);
                fetch_inputs(c, c->v, next, first + T, head, part + 1, parts);
                product(C, width, C, t.inverse, C, 1, YO + at, V_row, E + at, V_row, NULL, NULL);
                fetch_inputs(c, c->v, next, first + T, head, part + 2, parts);
                product(C, width, C, t.own, C, 1, E + at, V_row, O + at, V_row, O + at, NULL);
                fetch_inputs(c, c->v, next, first + T, head, part + 3, parts);
                product(K, width, C, t.writes, 1, K_row, E + at, V_row, S + at, V_row, S + at, t.keep);
            }
        } else
            token_by_token(c, token, head, n, S, E, O);
        if (c->kept) copy_rows(n, V, E, V_row, row_of(c->E, token, head), c->E.token);
        copy_rows(n, V, O, V_row, row_of(c->o, token, head), c->o.token);
    }
    copy_rows(K, V, S, V_row, c->S_last + state * K * V, V);
}
