/* The backward pass of KDA for one head of one document, from its last tile to its first.
 *
 * The forward pass kept every E, and one state every GROUP tiles. The states between are made again, group by group, and all else of a tile,
 * too. With
 * Y = V - (exp(G) K) S, primes for what comes after the tile, and d for gradients:
 *
 *     dE = (P diag(beta))^T dO + writes dS'        writes = diag(beta) (exp(G_C - G) K)        dV = dY = inverse^T dE
 *     dS = Diag(exp(G_C)) dS' + (exp(G) Q)^T dO - (exp(G) K)^T dY
 *     dA = -dY E^T diag(beta)   j < i          dP = dO E^T diag(beta)   j <= i
 *
 * A key is a row of A and (negated) of what is read from S; it is a column of A, P and writes:
 *
 *     row_i = -exp(G_i) dY_i S^T + sum_j dA_ij exp(G_i - G_j) k_j            dq_i the same with dO and dP
 *     column_j = beta_j exp(G_C - G_j) E_j dS'^T + sum_i exp(G_i - G_j) (dA_ij k_i + dP_ij q_i)
 *     dk = row + column        dG = k (row - column) + q dq        dG_C also has the sum of S' dS' over the value channels
 *
 * since exp(G_i - G_j) gives G_i what reaches row i times that row, and G_j minus the same of column j. g's gradient is G's, summed from
 * a token to the tile's end. The sum of S' dS' need not be made from the two states: it is the gradient of the next token's g, too, by which
 * all of S' is scaled. Only a group's last tile makes it, so that rounding errors don't add up over a long document.
 */
#include "native_tile.h"

int64_t kda_backward_memory(int64_t K, int64_t V) {
    return (GROUP + 1 + C) * K * WIDE(V) + GROUP * (TILE_SIZE(K) + C * WIDE(V)) + 6 * C * WIDE(V) + 8 * C * WIDE(K) + 2 * C * C + K;
}

INLINE float total(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE float dot(int64_t n, const float *x, const float *y) {
    vec sum = {0};
    for (int64_t i = 0; i < n; i += LANES) sum += load(x + i) * load(y + i);
    return total(sum);
}

/* Before each product, ask for a part of what comes next: where this tile's gradients go, the next tile's dO, and a tile of the group after. */
#define PARTS 9
#define FETCH(part) fetch_ahead(d, first, token, n, head, part)
INLINE void fetch_ahead(const Gradients *d, int64_t first, int64_t token, int64_t n, int64_t head, int64_t part) {
    const Call *c = &d->call;
    int64_t next = token - C, group = token - GROUP * C;
    for (int64_t i = C * part / PARTS; i < C * (part + 1) / PARTS; i++) {
        if (i < n) {
            fetch(d->dq, token + i, head, c->K), fetch(d->dk, token + i, head, c->K);
            fetch(d->dg, token + i, head, c->K), fetch(d->dv, token + i, head, c->V);
        }
        if (next >= first) fetch(d->dO, next + i, head, c->V);
    }
    if (group >= first) fetch_inputs(c, c->E, group, token, head, part, PARTS);
}

/* Gradients of one dense tile. S is the state before it, E its errors and D [2C, V] first anything, then dO. dS turns from the gradient of
 * the state after the tile into that of S, and later [K] from that of the next token's g, unless the tile is the last of its group, into that
 * of its first token's. */
static void dense_tile(const Gradients *d, int64_t first, int64_t token, int64_t head, int64_t n, int last, Tile t, const float *S, float *dS,
                       float *later, const float *E, float *D, float *memory) {
    const Call *c = &d->call;
    int64_t K = c->K, V = c->V, K_row = WIDE(K), V_row = WIDE(V);
    float *dE = take(&memory, C * V_row), *E_across = take(&memory, V * C), *D_across = take(&memory, V * 2 * C);
    float *raw_across = take(&memory, K * 2 * C), *rows = take(&memory, 2 * C * K_row), *columns = take(&memory, C * K_row);
    float *own_rows = take(&memory, 2 * C * K_row), *own_columns = take(&memory, C * K_row);
    float *dAP = take(&memory, 2 * C * C), *dY = D, *dO = D + C * V_row, scale = c->scale;

    FETCH(0);
    product(C, V, C, t.own, 1, C, dO, V_row, dE, V_row, NULL, NULL);
    FETCH(1);
    product(C, V, K, t.writes, K_row, 1, dS, V_row, dE, V_row, dE, NULL);
    FETCH(2);
    product(C, V, C, t.inverse, 1, C, dE, V_row, dY, V_row, NULL, NULL);

    /* sums over value channels: the state gives one number at a time, so that it need not be transposed; the tokens are */
    transpose(C, V, E, V_row, E_across, C);
    transpose(2 * C, V, D, V_row, D_across, 2 * C);
    FETCH(3);
    product(2 * C, C, V, D, V_row, 1, E_across, C, dAP, C, NULL, NULL);
    FETCH(4);
    product(K, C, V, dS, V_row, 1, E_across, C, raw_across, C, NULL, NULL);
    transpose(K, C, raw_across, C, columns, K_row); /* E dS'^T */
    FETCH(5);
    product(K, 2 * C, V, S, V_row, 1, D_across, 2 * C, raw_across, 2 * C, NULL, NULL);
    transpose(K, 2 * C, raw_across, 2 * C, rows, K_row); /* dY S^T, then dO S^T */
    for (int64_t m = 0; last && m < K; m++) later[m] = t.keep[m] * dot(V, S + m * V_row, dS + m * V_row);
    FETCH(6);
    product(K, V, 2 * C, t.in, 1, K_row, D, V_row, dS, V_row, dS, t.keep);

    float dbeta[C] = {0};
    for (int i = 0; i < C; i++)
        for (int j = 0; j < C; j++) {
            float *dA = dAP + i * C + j, *dP = dAP + (C + i) * C + j;
            dbeta[j] += t.AP[(C + i) * C + j] * *dP - t.AP[i * C + j] * *dA; /* A and P are zero outside their triangles */
            *dA = j < i ? -t.beta[j] * *dA : 0;
            *dP = j <= i ? t.beta[j] * *dP : 0;
        }
    FETCH(7);
    product(2 * C, K, C, dAP, C, 1, t.columns, K_row, own_rows, K_row, NULL, NULL);
    FETCH(8);
    product(C, K, 2 * C, dAP, 1, C, t.rows, K_row, own_columns, K_row, NULL, NULL);

    for (int64_t j = 0; last && j < n; j++) /* S' is what S left and what was written */
        for (int64_t at = 0; at < K; at += LANES)
            store(later + at, load(later + at) + load(t.writes + j * K_row + at) * load(columns + j * K_row + at));
    for (int64_t i = n - 1; i >= 0; i--) {
        const float *q = row_of(c->q, token + i, head), *k = row_of(c->k, token + i, head);
        float *dq_ = row_of(d->dq, token + i, head), *dk = row_of(d->dk, token + i, head), *dg = row_of(d->dg, token + i, head);
        vec dbeta_ = {0};
        for (int64_t at = 0; at < K; at += LANES) {
            int64_t here = i * K_row + at, queries = here + C * K_row;
            vec into = load(t.into + at), fade = load(t.fade + here), q_ = load(q + at) * scale, k_ = load(k + at);
            vec row = fade * (load(own_rows + here) - into * load(rows + here));
            vec dq = fade * (load(own_rows + queries) + into * load(rows + queries));
            vec raw = load(t.out_of + at) * load(columns + here), column = (load(own_columns + here) + t.beta[i] * raw) / fade;
            vec dG = load(later + at) + k_ * (row - column) + q_ * dq;
            dbeta_ += load(t.columns + here) * raw;
            store(later + at, dG), store(dg + at, dG);
            store(dq_ + at, dq * scale), store(dk + at, row + column);
        }
        *row_of(d->dbeta, token + i, head) = dbeta[i] + total(dbeta_);
    }
    copy_rows(n, V, dY, V_row, row_of(d->dv, token, head), d->dv.token);
}

/* faded [n, K, V], unless it is NULL: the state that each token finds, after its fading. S ends as the state after the last one. */
static void faded_states(const Call *c, int64_t token, int64_t head, int64_t n, const float *E, float *S, float *faded) {
    int64_t K = c->K, V = c->V, V_row = WIDE(V);
    for (int64_t i = 0; i < n; i++) {
        const float *g = row_of(c->g, token + i, head), *k = row_of(c->k, token + i, head);
        float beta = *row_of(c->beta, token + i, head), alpha[256];
        for (int64_t at = 0; at < K; at += LANES) store(alpha + at, exp2_(load(g + at) * LOG2_E));
        for (int64_t m = 0; m < K; m++)
            for (int64_t at = 0; at < V; at += LANES) {
                vec F = alpha[m] * load(S + m * V_row + at);
                if (faded) store(faded + (i * K + m) * V_row + at, F);
                store(S + m * V_row + at, F + k[m] * beta * load(E + i * V_row + at));
            }
    }
}

/* Gradients of a tile that is too steep for products, token by token. With F the faded state and w = beta e what is written:
 *     dS += q dO^T   dq = (F + k w^T) dO   dw = dS^T k   dv = beta dw   dbeta = e dw   dF = dS - k dv^T   dk = dS w - F dv
 *     dg = the sum of F dF over the value channels   dS = Diag(exp(g)) dF
 */
static void steep_tile(const Gradients *d, int64_t token, int64_t head, int64_t n, float *S, float *dS, float *later, const float *E,
                       const float *dO, float *memory) {
    const Call *c = &d->call;
    int64_t K = c->K, V = c->V, V_row = WIDE(V);
    float *faded = take(&memory, C * K * V_row), dw[256], dv[256], w[256], alpha[256];
    faded_states(c, token, head, n, E, S, faded);
    for (int64_t i = n - 1; i >= 0; i--) {
        int64_t now = token + i;
        const float *q = row_of(c->q, now, head), *k = row_of(c->k, now, head), *g = row_of(c->g, now, head);
        const float *e = E + i * V_row, *dO_ = dO + i * V_row, *F = faded + i * K * V_row;
        float *dq = row_of(d->dq, now, head), *dk = row_of(d->dk, now, head), *dg = row_of(d->dg, now, head);
        float beta = *row_of(c->beta, now, head);
        for (int64_t at = 0; at < K; at += LANES) store(alpha + at, exp2_(load(g + at) * LOG2_E));
        for (int64_t at = 0; at < V; at += LANES) {
            vec sum = {0};
            for (int64_t m = 0; m < K; m++) {
                vec x = load(dS + m * V_row + at) + c->scale * q[m] * load(dO_ + at);
                store(dS + m * V_row + at, x);
                sum += k[m] * x;
            }
            store(dw + at, sum), store(dv + at, beta * sum), store(w + at, beta * load(e + at));
        }
        float w_dO = dot(V, w, dO_);
        for (int64_t m = 0; m < K; m++) {
            const float *F_ = F + m * V_row;
            float *dS_ = dS + m * V_row;
            dq[m] = c->scale * (dot(V, F_, dO_) + k[m] * w_dO);
            dk[m] = dot(V, dS_, w) - dot(V, F_, dv);
            vec sum = {0};
            for (int64_t at = 0; at < V; at += LANES) {
                vec dF = load(dS_ + at) - k[m] * load(dv + at);
                sum += load(F_ + at) * dF;
                store(dS_ + at, alpha[m] * dF);
            }
            dg[m] = later[m] = total(sum);
        }
        memcpy(row_of(d->dv, now, head), dv, V * sizeof(float));
        *row_of(d->dbeta, now, head) = dot(V, e, dw);
    }
}

/* Make a tile again, with its errors E, and the state after it, unless `after` is NULL, from the state S before it. Returns whether the tile
 * is dense. */
static int again(const Call *c, int64_t token, int64_t end, int64_t head, Tile t, float *E, const float *S, float *after) {
    int64_t K = c->K, V = c->V, V_row = WIDE(V), n = end - token < C ? end - token : C, panels = (V + 2 * LANES - 1) / (2 * LANES);
    const float *e[C];
    find(e, c->E, token, head, n);
    for (int i = 0; i < C; i++) memcpy(E + i * V_row, e[i], V * sizeof(float));
    if (!decay(c, token, head, n, t)) {
        if (after) copy_rows(K, V, S, V_row, after, V_row), faded_states(c, token, head, n, E, after, NULL);
        return 0;
    }
    within(K, t);
    for (int64_t at = 0, part = 0; after && at < V; at += 2 * LANES, part++) {
        fetch_inputs(c, c->E, token + C, end, head, part, panels);
        product(K, V - at < 2 * LANES ? V - at : 2 * LANES, C, t.writes, 1, WIDE(K), E + at, V_row, after + at, V_row, S + at, t.keep);
    }
    return 1;
}

void kda_backward_sequence(const Gradients *d, int64_t document, int64_t head, float *memory) {
    const Call *c = &d->call;
    int64_t K = c->K, V = c->V, V_row = WIDE(V);
    int64_t first = c->bounds[document], end = c->bounds[document + 1], state = document * c->heads + head;
    float *S[GROUP], *E[GROUP], *dS = take(&memory, K * V_row), *D = take(&memory, 2 * C * V_row), *later = take(&memory, K);
    Tile t[GROUP];
    int dense[GROUP];
    for (int j = 0; j < GROUP; j++) S[j] = take(&memory, K * V_row), E[j] = take(&memory, C * V_row), t[j] = new_tile(&memory, K);
    copy_rows(K, V, d->dS_last + state * K * V, V, dS, V_row);
    for (int64_t group = (end - first - 1) / (GROUP * C); group >= 0; group--) {
        int64_t start = first + group * GROUP * C, tiles = (end - start + C - 1) / C < GROUP ? (end - start + C - 1) / C : GROUP;
        copy_rows(K, V, c->kept + ((c->first_kept[document] + group) * c->heads + head) * K * V, V, S[0], V_row);
        for (int64_t j = 0; j < tiles; j++) {
            int64_t stop = start + tiles * C < end ? start + tiles * C : end;
            dense[j] = again(c, start + j * C, stop, head, t[j], E[j], S[j], j + 1 < tiles ? S[j + 1] : NULL);
        }
        for (int64_t j = tiles - 1; j >= 0; j--) {
            int64_t token = start + j * C, n = end - token < C ? end - token : C;
            const float *dO[C];
            find(dO, d->dO, token, head, n);
            for (int i = 0; i < C; i++) memcpy(D + (C + i) * V_row, dO[i], V * sizeof(float));
            if (dense[j]) dense_tile(d, first, token, head, n, j + 1 == tiles, t[j], S[j], dS, later, E[j], D, memory);
            else steep_tile(d, token, head, n, S[j], dS, later, E[j], D + C * V_row, memory);
        }
    }
    copy_rows(K, V, dS, V_row, d->dS_first + state * K * V, V);
}
