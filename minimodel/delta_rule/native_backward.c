/* The backward pass of KDA for one head of one document, from its last tile to its first.
 *
 * The forward pass kept the error of every token and one state every GROUP tiles. The states between are made again, group by group, and all
 * else of a tile, too. With Y = V - (exp(G) K) S, primes for what comes after the tile, and d for gradients:
 *
 *     dE = (P diag(beta))^T dO + W dS'        W = diag(beta) (exp(G_C - G) K), what is written        dV = dY = M^T dE
 *     dS = Diag(exp(G_C)) dS' + (exp(G) Q)^T dO - (exp(G) K)^T dY
 *     dA = -dY E^T diag(beta)   j < i          dP = dO E^T diag(beta)   j <= i
 *
 * A key is a row of A and (negated) of what is read from S; it is a column of A, P and W:
 *
 *     row_i = -exp(G_i) dY_i S^T + sum_j dA_ij exp(G_i - G_j) k_j            dq_i the same with dO and dP
 *     column_j = beta_j exp(G_C - G_j) E_j dS'^T + sum_i exp(G_i - G_j) (dA_ij k_i + dP_ij q_i)
 *     dk = row + column        dG = k (row - column) + q dq        dG_C also has the sum of S' dS' over the value channels
 *
 * since exp(G_i - G_j) gives G_i what reaches row i times that row, and G_j minus the same of column j. g's gradient is G's, summed from
 * a token to the tile's end.
 */
#include "native_tile.h"

int64_t kda_backward_memory(int64_t K, int64_t V) {
    return (GROUP + 1 + C) * K * (V + 16) + GROUP * TILE_SIZE(K) + 7 * C * V + 8 * C * K + 2 * C * C + K;
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

/* Gradients of one dense tile. S is the state before it, E its errors and D [2C, V] first anything, then dO. dS turns from the gradient of
 * the state after the tile into that of S. */
static void dense_tile(const Gradients *d, int64_t token, int64_t head, int64_t n, Tile t, const float *S, float *dS, const float *E, float *D,
                       float *memory) {
    const Call *c = &d->call;
    int64_t K = c->K, V = c->V, S_row = V + 16;
    float *dE = take(&memory, C * V), *E_across = take(&memory, V * C), *D_across = take(&memory, V * 2 * C);
    float *raw_across = take(&memory, K * 2 * C), *rows = take(&memory, 2 * C * K), *columns = take(&memory, C * K);
    float *own_rows = take(&memory, 2 * C * K), *own_columns = take(&memory, C * K), *dAP = take(&memory, 2 * C * C), *SdS = take(&memory, K);
    float *dY = D, *dO = D + C * V;

    product(C, V, C, t.own, 1, C, dO, V, dE, V, NOTHING);
    product(C, V, K, t.writes, K, 1, dS, S_row, dE, V, ITSELF);
    product(C, V, C, t.M, 1, C, dE, V, dY, V, NOTHING);

    /* sums over value channels: the state gives one number at a time, so that it need not be transposed; the tokens are */
    transpose(C, V, E, V, E_across, C);
    transpose(2 * C, V, D, V, D_across, 2 * C);
    product(2 * C, C, V, D, V, 1, E_across, C, dAP, C, NOTHING);
    product(K, C, V, dS, S_row, 1, E_across, C, raw_across, C, NOTHING);
    transpose(K, C, raw_across, C, columns, K); /* E dS'^T */
    product(K, 2 * C, V, S, S_row, 1, D_across, 2 * C, raw_across, 2 * C, NOTHING);
    transpose(K, 2 * C, raw_across, 2 * C, rows, K); /* dY S^T, then dO S^T */
    for (int64_t m = 0; m < K; m++) SdS[m] = t.keep[m] * dot(V, S + m * S_row, dS + m * S_row);
    product(K, V, 2 * C, t.in, 1, K, D, V, dS, S_row, t.keep);

    float dbeta[C] = {0};
    for (int i = 0; i < C; i++)
        for (int j = 0; j < C; j++) {
            float *dA = dAP + i * C + j, *dP = dAP + (C + i) * C + j;
            dbeta[j] += t.AP[(C + i) * C + j] * *dP - t.AP[i * C + j] * *dA; /* A and P are zero outside their triangles */
            *dA = j < i ? -t.beta[j] * *dA : 0;
            *dP = j <= i ? t.beta[j] * *dP : 0;
        }
    product(2 * C, K, C, dAP, C, 1, t.columns, K, own_rows, K, NOTHING);
    product(C, K, 2 * C, dAP, 1, C, t.rows, K, own_columns, K, NOTHING);

    const float *q[C], *k[C];
    find(q, c->q, token, head, n), find(k, c->k, token, head, n);
    vec dbeta_[C] = {0};
    for (int64_t at = 0; at < K; at += LANES) {
        vec into = load(t.into + at), out_of = load(t.out_of + at), dG = load(SdS + at);
        for (int j = 0; j < C; j++) dG += load(t.writes + j * K + at) * load(columns + j * K + at); /* S' is what S left and what was written */
        for (int64_t i = C - 1; i >= 0; i--) {
            int64_t here = i * K + at, queries = here + C * K;
            vec fade = load(t.fade + here), q_ = load(q[i] + at) * c->scale, k_ = load(k[i] + at), raw = out_of * load(columns + here);
            vec row = fade * (load(own_rows + here) - into * load(rows + here));
            vec dq = fade * (load(own_rows + queries) + into * load(rows + queries));
            vec column = (load(own_columns + here) + t.beta[i] * raw) / fade;
            dbeta_[i] += load(t.columns + here) * raw;
            dG += k_ * (row - column) + q_ * dq;
            if (i >= n) continue;
            store(d->dq.at + (token + i) * d->dq.token + head * d->dq.head + at, dq * c->scale);
            store(d->dk.at + (token + i) * d->dk.token + head * d->dk.head + at, row + column);
            store(d->dg.at + (token + i) * d->dg.token + head * d->dg.head + at, dG);
        }
    }
    copy_rows(n, V, dY, V, d->dv.at + token * d->dv.token + head * d->dv.head, d->dv.token);
    for (int64_t i = 0; i < n; i++) d->dbeta.at[(token + i) * d->dbeta.token + head * d->dbeta.head] = dbeta[i] + total(dbeta_[i]);
}

/* The state after `n` tokens whose errors are known, or (faded given) before each of them is written: S = Diag(exp(g)) S + k (beta e)^T. */
static void replay(const Call *c, int64_t token, int64_t head, int64_t n, const float *E, float *S, float *faded) {
    int64_t K = c->K, V = c->V, S_row = V + 16;
    for (int64_t i = 0; i < n; i++) {
        const float *g = c->g.at + (token + i) * c->g.token + head * c->g.head, *k = c->k.at + (token + i) * c->k.token + head * c->k.head;
        float beta = c->beta.at[(token + i) * c->beta.token + head * c->beta.head], alpha[256];
        for (int64_t at = 0; at < K; at += LANES) store(alpha + at, exp2_(load(g + at) * LOG2_E));
        for (int64_t m = 0; m < K; m++)
            for (int64_t at = 0; at < V; at += LANES) {
                vec F = alpha[m] * load(S + m * S_row + at);
                if (faded) store(faded + (i * K + m) * S_row + at, F);
                store(S + m * S_row + at, F + k[m] * beta * load(E + i * V + at));
            }
    }
}

/* Gradients of a tile that is too steep for products, token by token. With F the faded state and w = beta e what is written:
 *     dS += q dO^T   dq = (F + k w^T) dO   dw = dS^T k   dv = beta dw   dbeta = e dw   dF = dS - k dv^T   dk = dS w - F dv
 *     dg = the sum of F dF over the value channels   dS = Diag(exp(g)) dF
 */
static void steep_tile(const Gradients *d, int64_t token, int64_t head, int64_t n, float *S, float *dS, const float *E, const float *dO,
                       float *memory) {
    const Call *c = &d->call;
    int64_t K = c->K, V = c->V, S_row = V + 16;
    float *faded = take(&memory, C * K * S_row), dw[256], dv[256], w[256], alpha[256];
    replay(c, token, head, n, E, S, faded);
    for (int64_t i = n - 1; i >= 0; i--) {
        int64_t now = token + i;
        const float *q = c->q.at + now * c->q.token + head * c->q.head, *k = c->k.at + now * c->k.token + head * c->k.head;
        const float *g = c->g.at + now * c->g.token + head * c->g.head, *e = E + i * V, *dO_ = dO + i * V, *F = faded + i * K * S_row;
        float beta = c->beta.at[now * c->beta.token + head * c->beta.head];
        float *dq = d->dq.at + now * d->dq.token + head * d->dq.head, *dk = d->dk.at + now * d->dk.token + head * d->dk.head;
        float *dg = d->dg.at + now * d->dg.token + head * d->dg.head;
        for (int64_t at = 0; at < K; at += LANES) store(alpha + at, exp2_(load(g + at) * LOG2_E));
        for (int64_t at = 0; at < V; at += LANES) {
            vec sum = {0};
            for (int64_t m = 0; m < K; m++) {
                vec x = load(dS + m * S_row + at) + c->scale * q[m] * load(dO_ + at);
                store(dS + m * S_row + at, x);
                sum += k[m] * x;
            }
            store(dw + at, sum), store(dv + at, beta * sum), store(w + at, beta * load(e + at));
        }
        float w_dO = dot(V, w, dO_);
        for (int64_t m = 0; m < K; m++) {
            const float *F_ = F + m * S_row;
            float *dS_ = dS + m * S_row;
            dq[m] = c->scale * (dot(V, F_, dO_) + k[m] * w_dO);
            dk[m] = dot(V, dS_, w) - dot(V, F_, dv);
            vec sum = {0};
            for (int64_t at = 0; at < V; at += LANES) {
                vec dF = load(dS_ + at) - k[m] * load(dv + at);
                sum += load(F_ + at) * dF;
                store(dS_ + at, alpha[m] * dF);
            }
            dg[m] = total(sum);
        }
        memcpy(d->dv.at + now * d->dv.token + head * d->dv.head, dv, V * sizeof(float));
        d->dbeta.at[now * d->dbeta.token + head * d->dbeta.head] = dot(V, e, dw);
    }
}

void kda_backward_sequence(const Gradients *d, int64_t document, int64_t head, float *memory) {
    const Call *c = &d->call;
    int64_t K = c->K, V = c->V, S_row = V + 16;
    int64_t first = c->bounds[document], T = c->bounds[document + 1] - first, state = document * c->heads + head;
    float *S[GROUP], *dS = take(&memory, K * S_row), *E = take(&memory, C * V), *D = take(&memory, 2 * C * V);
    Tile t[GROUP];
    int dense[GROUP];
    for (int j = 0; j < GROUP; j++) S[j] = take(&memory, K * S_row), t[j] = new_tile(&memory, K);
    copy_rows(K, V, d->dS_last + state * K * V, V, dS, S_row);
    for (int64_t group = (T - 1) / (GROUP * C); group >= 0; group--) {
        int64_t start = first + group * GROUP * C, end = start + GROUP * C < first + T ? start + GROUP * C : first + T;
        int64_t tiles = (end - start + C - 1) / C;
        copy_rows(K, V, c->kept + ((c->first_kept[document] + group) * c->heads + head) * K * V, V, S[0], S_row);
        for (int64_t j = 0; j < tiles; j++) {
            int64_t token = start + j * C, n = end - token < C ? end - token : C;
            const float *e[C];
            find(e, c->e, token, head, n);
            dense[j] = decay(c, token, head, n, t[j]);
            if (dense[j]) within(K, t[j]);
            if (j + 1 == tiles) break;
            memcpy(S[j + 1], S[j], K * S_row * sizeof(float));
            for (int i = 0; i < C; i++) memcpy(E + i * V, e[i], V * sizeof(float));
            if (dense[j]) product(K, V, C, t[j].writes, 1, K, E, V, S[j + 1], S_row, t[j].keep);
            else replay(c, token, head, n, E, S[j + 1], NULL);
        }
        for (int64_t j = tiles - 1; j >= 0; j--) {
            int64_t token = start + j * C, n = end - token < C ? end - token : C;
            const float *e[C], *dO[C];
            find(e, c->e, token, head, n), find(dO, d->dO, token, head, n);
            for (int i = 0; i < C; i++) memcpy(E + i * V, e[i], V * sizeof(float)), memcpy(D + (C + i) * V, dO[i], V * sizeof(float));
            if (dense[j]) dense_tile(d, token, head, n, t[j], S[j], dS, E, D, memory);
            else steep_tile(d, token, head, n, S[j], dS, E, D + C * V, memory);
        }
    }
    copy_rows(K, V, dS, S_row, d->dS_first + state * K * V, V);
}
