/* The one matrix product: a block of ROWS rows and two vectors of columns is summed in registers, then written once. */
#include "native_tile.h"

const float ZEROS[256];

INLINE void block(const int width, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, float *c,
                  int64_t c_row, const float *from, const float *keep) {
    vec sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int n = 0; n < width; n++) {
            if (!from) sum[r][n] = (vec){0};
            else if (!keep) sum[r][n] = load(from + r * c_row + n * LANES);
            else sum[r][n] = keep[r] * load(from + r * c_row + n * LANES);
        }
    for (int64_t i = 0; i < depth; i++) {
        vec b0 = load(b + i * b_step), b1 = width > 1 ? load(b + i * b_step + LANES) : b0;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            float x = a[r * a_row + i * a_step];
            sum[r][0] += x * b0;
            if (width > 1) sum[r][1] += x * b1;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int n = 0; n < width; n++) store(c + r * c_row + n * LANES, sum[r][n]);
}

void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
             float *c, int64_t c_row, const float *from, const float *keep) {
    for (int64_t n = 0; n < columns; n += 2 * LANES)
        for (int64_t r = 0; r < rows; r += ROWS) {
            const float *a_ = a + r * a_row, *from_ = from ? from + r * c_row + n : NULL, *keep_ = keep ? keep + r : NULL;
            float *c_ = c + r * c_row + n;
            if (n + LANES < columns) block(2, depth, a_, a_row, a_step, b + n, b_step, c_, c_row, from_, keep_);
            else block(1, depth, a_, a_row, a_step, b + n, b_step, c_, c_row, from_, keep_);
        }
}

typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t ivec4 __attribute__((vector_size(16)));
typedef vec4 anywhere4 __attribute__((aligned(4), may_alias));
#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (ivec4){__VA_ARGS__})
#endif

/* y [columns, rows] = the transpose of x [rows, columns], both multiples of 4, in blocks of 4 x 4. */
void transpose(int64_t rows, int64_t columns, const float *x, int64_t x_row, float *y, int64_t y_row) {
    for (int64_t r = 0; r < rows; r += 4)
        for (int64_t c = 0; c < columns; c += 4) {
            const float *from = x + r * x_row + c;
            float *to = y + c * y_row + r;
            vec4 a = *(const anywhere4 *)from, b = *(const anywhere4 *)(from + x_row);
            vec4 c_ = *(const anywhere4 *)(from + 2 * x_row), d = *(const anywhere4 *)(from + 3 * x_row);
            vec4 ab = MIX(a, b, 0, 4, 1, 5), cd = MIX(c_, d, 0, 4, 1, 5), AB = MIX(a, b, 2, 6, 3, 7), CD = MIX(c_, d, 2, 6, 3, 7);
            *(anywhere4 *)to = MIX(ab, cd, 0, 1, 4, 5);
            *(anywhere4 *)(to + y_row) = MIX(ab, cd, 2, 3, 6, 7);
            *(anywhere4 *)(to + 2 * y_row) = MIX(AB, CD, 0, 1, 4, 5);
            *(anywhere4 *)(to + 3 * y_row) = MIX(AB, CD, 2, 3, 6, 7);
        }
}

