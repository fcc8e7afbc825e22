/* Kernels for bfloat16 on x86-64 with AVX512-BF16; attention also needs AMX. `native.py` compiles them,
   `nn/kernels.py` calls and documents them.

   Every row is computed independently and in a fixed order: results do not depend on threads or on other rows. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bfloat16;
typedef struct { float constant[32], linear[32], square[32]; } Table; /* coefficients of parabolas: see `interpolate` */
typedef struct { __m512 low[3], high[3]; } LoadedTable;
typedef struct { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } TileShapes;
typedef struct { long image, head, token; } Strides; /* in elements */
typedef struct {
    const bfloat16 *q, *k, *v;
    bfloat16 *y;
    Strides q_strides, k_strides, v_strides, y_strides;
    long images, heads, queries, keys, channels, parts;
    float scale;
    float *statistics; /* of each query, by image and head: maximum of its logits times scale log2(e), and 1 / sum */
} Attention;
typedef struct {
    const bfloat16 *q, *k, *v, *y, *dy;
    bfloat16 *dq, *dk, *dv;
    Strides q_strides, k_strides, v_strides, y_strides, dy_strides, dq_strides, dk_strides, dv_strides;
    long images, heads, queries, keys, channels;
    float scale;
    const float *statistics; /* as `attend` writes them */
} AttentionGradients;

typedef struct {
    const bfloat16 *x;
    bfloat16 *y;
    const float *cos, *sin; /* of each token: `pairs` factors, those of an image after `image_factors` others */
    Strides x_strides, y_strides;
    long images, heads, tokens, pairs, image_factors;
    float sign; /* -1 rotates back */
} Rotation;

enum { ROWS = 16, TILE = 1024, BLOCK = 32 }; /* rows and bytes of a tile; queries, and channels or keys, of a block */
static const float LOG2_E = 1.44269504f;
enum { MIN_PARALLEL_ELEMENTS = 1 << 17 };            /* number of elements above which threads share a loop */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

static const TileShapes SHAPES = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* prevents reordering: the compiler does not know which memory tile instructions read and write */
#define BARRIER() __asm__ volatile("" ::: "memory")

/* address of a head of an image in the tensor `x` of the arguments `a` */
#define HEAD(x) (a->x + image * a->x##_strides.image + head * a->x##_strides.head)

static inline long minimum(long a, long b) { return a < b ? a : b; }
static inline long blocks_of(long count) { return (count + BLOCK - 1) / BLOCK; }
static inline __mmask32 lanes(long count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }
static inline __m512 widen(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* Requests permission for tiles from the system. Returns 0 if it is granted. */
long request_tiles(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA); }

/* out = (x - mean) / sqrt(variance + eps) * weight + bias for each of `rows`; `width` is a multiple of 16 */
void layer_norm(const float *x, const float *weight, const float *bias, bfloat16 *out, long rows, long width, float eps)
{
#pragma omp parallel for schedule(static) if (rows * width > MIN_PARALLEL_ELEMENTS)
    for (long i = 0; i < rows; i++) {
        const float *row = x + i * width;
        __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (long c = 0; c < width; c += 16)
            sum = _mm512_add_ps(sum, _mm512_loadu_ps(row + c));
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)width);
        for (long c = 0; c < width; c += 16) {
            __m512 centred = _mm512_sub_ps(_mm512_loadu_ps(row + c), mean);
            squares = _mm512_fmadd_ps(centred, centred, squares);
        }
        __m512 variance = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / (float)width + eps);
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(variance));
        for (long c = 0; c < width; c += 16) {
            __m512 y = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(row + c), mean), factor);
            y = _mm512_fmadd_ps(y, _mm512_loadu_ps(weight + c), _mm512_loadu_ps(bias + c));
            _mm256_storeu_si256((__m256i *)(out + i * width + c), (__m256i)_mm512_cvtneps_pbh(y));
        }
    }
}

/* out = x + y */
void add(const float *x, const bfloat16 *y, float *out, long count)
{
#pragma omp parallel for schedule(static) if (count > MIN_PARALLEL_ELEMENTS)
    for (long i = 0; i < count; i += 16) {
        __mmask16 mask = (__mmask16)lanes(minimum(count - i, 16));
        __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, x + i), widen(_mm256_maskz_loadu_epi16(mask, y + i)));
        _mm512_mask_storeu_ps(out + i, mask, sum);
    }
}

/* y = x with each pair (a, b) of channels c and c + pairs of a head rotated to (a cos - b sin, b cos + a sin) */
void rotate(const Rotation *a)
{
    __m512 sign = _mm512_set1_ps(a->sign);
#pragma omp parallel for collapse(2) schedule(static) \
    if (a->images * a->tokens * a->heads * a->pairs > MIN_PARALLEL_ELEMENTS / 2)
    for (long image = 0; image < a->images; image++)
        for (long token = 0; token < a->tokens; token++) {
            const float *cos = a->cos + image * a->image_factors + token * a->pairs, *sin = a->sin + (cos - a->cos);
            for (long head = 0; head < a->heads; head++) {
                const bfloat16 *x = HEAD(x) + token * a->x_strides.token;
                bfloat16 *y = HEAD(y) + token * a->y_strides.token;
                for (long c = 0; c < a->pairs; c += 16) {
                    __mmask16 mask = (__mmask16)lanes(minimum(a->pairs - c, 16));
                    __m512 u = widen(_mm256_maskz_loadu_epi16(mask, x + c));
                    __m512 v = widen(_mm256_maskz_loadu_epi16(mask, x + a->pairs + c));
                    __m512 t = _mm512_maskz_loadu_ps(mask, cos + c);
                    __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sin + c), sign);
                    __m512 first = _mm512_fmsub_ps(u, t, _mm512_mul_ps(v, s));
                    __m512 second = _mm512_fmadd_ps(v, t, _mm512_mul_ps(u, s));
                    _mm256_mask_storeu_epi16(y + c, mask, (__m256i)_mm512_cvtneps_pbh(first));
                    _mm256_mask_storeu_epi16(y + a->pairs + c, mask, (__m256i)_mm512_cvtneps_pbh(second));
                }
            }
        }
}

/* g(size) from a table of g: a parabola around each multiple of 1/4 up to 7.75 */
static inline __m512 interpolate(__m512 size, const LoadedTable *table)
{
    const __m512 to_quarters = _mm512_set1_ps(2097152.0f); /* 2^21: a sum with it has steps of 1/4 */
    __m512 near = _mm512_min_ps(size, _mm512_set1_ps(7.75f)), quarter = _mm512_add_ps(near, to_quarters);
    __m512 offset = _mm512_sub_ps(near, _mm512_sub_ps(quarter, to_quarters));
    __m512i index = _mm512_castps_si512(quarter);
    __m512 y = _mm512_permutex2var_ps(table->low[2], index, table->high[2]);
    y = _mm512_fmadd_ps(y, offset, _mm512_permutex2var_ps(table->low[1], index, table->high[1]));
    return _mm512_fmadd_ps(y, offset, _mm512_permutex2var_ps(table->low[0], index, table->high[0]));
}

/* x f(x) for a function f with f(-x) = 1 - f(x), from the table of g = f - 1/2: x / 2 + |x| g(|x|) */
static inline __m512 gelu_of(__m512 x, const LoadedTable *table)
{
    __m512 size = _mm512_abs_ps(x);
    return _mm512_fmadd_ps(interpolate(size, table), size, _mm512_mul_ps(x, _mm512_set1_ps(0.5f)));
}

/* f(x) for a function f with f(-x) = 1 - f(x), from the table of g = f - 1/2: 1/2 + sign(x) g(|x|) */
static inline __m512 slope_of(__m512 x, const LoadedTable *table)
{
    __m512 half = interpolate(_mm512_abs_ps(x), table);
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000));
    half = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(half), sign));
    return _mm512_add_ps(half, _mm512_set1_ps(0.5f));
}

static inline LoadedTable load_table(const Table *table)
{
    const float *columns[3] = {table->constant, table->linear, table->square};
    LoadedTable loaded;
    for (int i = 0; i < 3; i++) {
        loaded.low[i] = _mm512_loadu_ps(columns[i]);
        loaded.high[i] = _mm512_loadu_ps(columns[i] + 16);
    }
    return loaded;
}

static inline __m512 lower(__m512i both) { return widen(_mm512_castsi512_si256(both)); }
static inline __m512 upper(__m512i both) { return widen(_mm512_extracti64x4_epi64(both, 1)); }
static inline __m512i narrow(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* out = x f(x) with f from a table (`gelu_of`); `x` and `out` may be the same array */
void gelu(const bfloat16 *x, bfloat16 *out, const Table *table, long count)
{
    LoadedTable loaded = load_table(table);
#pragma omp parallel for schedule(static) if (count > MIN_PARALLEL_ELEMENTS)
    for (long i = 0; i < count; i += 32) {
        __mmask32 mask = lanes(count - i);
        __m512i both = _mm512_maskz_loadu_epi16(mask, x + i);
        both = narrow(gelu_of(lower(both), &loaded), gelu_of(upper(both), &loaded));
        _mm512_mask_storeu_epi16(out + i, mask, both);
    }
}

/* out = x f(x), and grad *= f(x) + x f'(x) in place; `table` is that of f, `slopes` that of f(x) + x f'(x) */
void gelu_backward(const bfloat16 *x, bfloat16 *grad, bfloat16 *out, const Table *table, const Table *slopes, long count)
{
    LoadedTable values = load_table(table), loaded = load_table(slopes);
#pragma omp parallel for schedule(static) if (count > MIN_PARALLEL_ELEMENTS)
    for (long i = 0; i < count; i += 32) {
        __mmask32 mask = lanes(count - i);
        __m512i both = _mm512_maskz_loadu_epi16(mask, x + i), grads = _mm512_maskz_loadu_epi16(mask, grad + i);
        __m512 low = _mm512_mul_ps(lower(grads), slope_of(lower(both), &loaded));
        __m512 high = _mm512_mul_ps(upper(grads), slope_of(upper(both), &loaded));
        _mm512_mask_storeu_epi16(grad + i, mask, narrow(low, high));
        both = narrow(gelu_of(lower(both), &values), gelu_of(upper(both), &values));
        _mm512_mask_storeu_epi16(out + i, mask, both);
    }
}

/* 2^x with a relative error of 1e-4 */
static inline __m512 exp2_of(__m512 x)
{
    __m512 integer = _mm512_roundscale_ps(x, 8), fraction = _mm512_sub_ps(x, integer);
    __m512 y = _mm512_set1_ps(0.05514708f);
    y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.24255303f));
    y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.69326007f));
    y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(0.99993224f));
    return _mm512_scalef_ps(y, integer);
}

/* Transposes 16 rows of 16 numbers of 32 bits, and stores `num_rows` rows of the result, `stride` bytes apart. */
static inline void store_transposed(__m512i a[16], uint8_t *to, long stride, long num_rows, __mmask16 columns)
{
    __m512i b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        if (i < num_rows)
            _mm512_mask_storeu_epi32(to + stride * i, columns, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        if (i + 8 < num_rows)
            _mm512_mask_storeu_epi32(to + stride * (i + 8), columns, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    }
}

/* at most 16 `rows` of up to 32 channels -> a tile of pairs of channels (16) by rows (16), padded with zeros */
static void pack_transposed(const bfloat16 *from, long stride, long rows, __mmask32 channels, uint8_t *tile)
{
    __m512i a[16];
    for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_maskz_loadu_epi16(channels, from + i * stride) : _mm512_setzero_si512();
    store_transposed(a, tile, 64, 16, 0xffff);
}

/* keys (n, c) -> tiles, ordered by block of 16 keys, then by block of 32 channels */
static void pack_keys(const bfloat16 *k, long stride, long keys, long channels, uint8_t *tiles)
{
    for (long n = 0; n < BLOCK * blocks_of(keys); n += ROWS)
        for (long c = 0; c < channels; c += BLOCK, tiles += TILE)
            pack_transposed(k + n * stride + c, stride, minimum(keys - n, ROWS), lanes(channels - c), tiles);
}

/* two rows of 32 numbers -> pairs of numbers of the same column, for the first and the last 16 columns */
static inline void interleave(__m512i even, __m512i odd, __m512i *first, __m512i *last)
{
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    *first = _mm512_permutex2var_epi16(even, low, odd);
    *last = _mm512_permutex2var_epi16(even, _mm512_add_epi16(low, _mm512_set1_epi16(16)), odd);
}

/* rows n and n + 1 of x (rows, columns), 32 columns from c on, interleaved, padded with zeros */
static inline void load_pairs(const bfloat16 *x, long stride, long n, long rows, long c, long columns, __m512i *first,
                              __m512i *last)
{
    __mmask32 even = n < rows ? lanes(columns - c) : 0, odd = n + 1 < rows ? lanes(columns - c) : 0;
    const bfloat16 *from = x + n * stride + c;
    interleave(_mm512_maskz_loadu_epi16(even, from), _mm512_maskz_loadu_epi16(odd, from + stride), first, last);
}

/* values (n, c) -> tiles of pairs of keys (16) by channels (16), by block of 16 channels, then of 32 keys */
static void pack_values(const bfloat16 *v, long stride, long keys, long channels, uint8_t *tiles)
{
    for (long c = 0; c < channels; c += BLOCK, tiles += 2 * TILE * blocks_of(keys))
        for (long n = 0; n < BLOCK * blocks_of(keys); n += 2) {
            __m512i low, high;
            uint8_t *to = tiles + n / BLOCK * TILE + n % BLOCK * 32;
            load_pairs(v, stride, n, keys, c, channels, &low, &high);
            _mm512_store_si512(to, low);
            _mm512_store_si512(to + TILE * blocks_of(keys), high);
        }
}

/* x (rows, columns) with rows `stride` apart -> out (columns, wide), padded with zeros; `wide` is even */
static void transpose_block(const bfloat16 *x, long stride, long rows, long columns, bfloat16 *out, long wide)
{
    for (long m = 0; m < wide; m += BLOCK)
        for (long c = 0; c < columns; c += BLOCK) {
            __m512i low[16], high[16];
            for (long i = 0; i < 16; i++)
                load_pairs(x, stride, m + 2 * i, rows, c, columns, low + i, high + i);
            __mmask16 pairs = (__mmask16)lanes(minimum((wide - m) / 2, 16));
            store_transposed(low, (uint8_t *)(out + c * wide + m), 2 * wide, columns - c, pairs);
            store_transposed(high, (uint8_t *)(out + (c + 16) * wide + m), 2 * wide, columns - c - 16, pairs);
        }
}

/* x (rows, columns) with rows `stride` apart -> out (columns, rows); both numbers are even */
void transpose(const bfloat16 *x, long stride, long rows, long columns, bfloat16 *out)
{
#pragma omp parallel for schedule(static) if (rows * columns > MIN_PARALLEL_ELEMENTS)
    for (long c = 0; c < columns; c += BLOCK)
        transpose_block(x + c, stride, rows, minimum(columns - c, BLOCK), out + c * rows, rows);
}

/* c (32, 32) = a (32, 32 steps) b, where b is two columns of `steps` tiles each; strides in bytes */
static inline void multiply(const uint8_t *a, long a_stride, const uint8_t *b, long steps, float *c, long c_stride)
{
    BARRIER();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long step = 0; step < steps; step++) {
        _tile_loadd(4, a + 64 * step, a_stride);
        _tile_loadd(6, b + TILE * step, 64);
        _tile_loadd(7, b + TILE * (steps + step), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + ROWS * a_stride + 64 * step, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    uint8_t *below = (uint8_t *)c + ROWS * c_stride;
    _tile_stored(0, c, c_stride);
    _tile_stored(1, c + 16, c_stride);
    _tile_stored(2, below, c_stride);
    _tile_stored(3, below + 64, c_stride);
    BARRIER();
}

/* Logits of a query -> 2^(scale (logit - maximum)) in bfloat16, 0 beyond the keys, and the query's statistics (see
   `Attention`). `scale` includes the factor log2(e), so these are exponentials. */
static inline void exponentials(const float *logits, long keys, __m512 scale, bfloat16 *out, float statistics[2])
{
    __m512 maximum = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
    for (long n = 0; n < keys; n += 16)
        maximum =
            _mm512_mask_max_ps(maximum, (__mmask16)lanes(minimum(keys - n, 16)), maximum, _mm512_load_ps(logits + n));
    __m512 shift = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(maximum)), scale);
    for (long n = 0; n < keys; n += BLOCK) {
        __mmask32 mask = lanes(keys - n);
        __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(logits + n), scale, shift));
        __m512 high = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(logits + n + 16), scale, shift));
        low = _mm512_maskz_mov_ps((__mmask16)mask, low);
        high = _mm512_maskz_mov_ps((__mmask16)(mask >> 16), high);
        sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
        _mm512_store_si512(out + n, narrow(low, high));
    }
    statistics[0] = _mm512_cvtss_f32(shift);
    statistics[1] = 1.0f / _mm512_reduce_add_ps(sum);
}

/* x (rows, columns) with rows `stride` apart -> out, padded with zeros to multiples of 32 rows and columns */
static void copy_padded(const bfloat16 *x, long stride, long rows, long columns, bfloat16 *out)
{
    long wide = BLOCK * blocks_of(columns);
    for (long i = 0; i < BLOCK * blocks_of(rows); i++)
        for (long c = 0; c < wide; c += BLOCK) {
            __mmask32 mask = i < rows ? lanes(columns - c) : 0;
            _mm512_store_si512(out + i * wide + c, _mm512_maskz_loadu_epi16(mask, x + i * stride + c));
        }
}

/* bytes of the workspace of `attend_head`, a multiple of 64: keys, values, queries, exponentials, logits, outputs */
static long attention_bytes(const Attention *a)
{
    long keys = BLOCK * blocks_of(a->keys), channels = BLOCK * blocks_of(a->channels);
    return 4 * keys * channels + 2 * BLOCK * channels + 6 * BLOCK * keys + 4 * BLOCK * channels;
}

/* y = softmax(scale q k^T) v for the queries [first, last) of a head of an image */
static void attend_head(const Attention *a, long image, long head, long first, long last, uint8_t *workspace)
{
    const bfloat16 *q = HEAD(q), *k = HEAD(k), *v = HEAD(v);
    bfloat16 *y = HEAD(y);
    long key_blocks = blocks_of(a->keys), channel_blocks = blocks_of(a->channels);
    long keys = BLOCK * key_blocks, channels = BLOCK * channel_blocks;
    uint8_t *packed_keys = workspace, *packed_values = packed_keys + 2 * keys * channels;
    bfloat16 *query_block = (bfloat16 *)(packed_values + 2 * keys * channels);
    bfloat16 *weights = query_block + BLOCK * channels;
    float *logits = (float *)(weights + BLOCK * keys), *outputs = logits + BLOCK * keys, row_statistics[BLOCK][2];
    float(*head_statistics)[2] = (float(*)[2])a->statistics + (image * a->heads + head) * a->queries;
    __m512 scale = _mm512_set1_ps(a->scale * LOG2_E);

    pack_keys(k, a->k_strides.token, a->keys, a->channels, packed_keys);
    pack_values(v, a->v_strides.token, a->keys, a->channels, packed_values);
    for (long m = first; m < last; m += BLOCK) {
        long rows = minimum(last - m, BLOCK);
        copy_padded(q + m * a->q_strides.token, a->q_strides.token, rows, a->channels, query_block);
        for (long n = 0; n < key_blocks; n++) {
            const uint8_t *tiles = packed_keys + 2 * n * channel_blocks * TILE;
            multiply((uint8_t *)query_block, 2 * channels, tiles, channel_blocks, logits + BLOCK * n, 4 * keys);
        }
        for (long i = 0; i < rows; i++)
            exponentials(logits + i * keys, a->keys, scale, weights + i * keys, row_statistics[i]);
        for (long i = 0; i < rows && a->statistics; i++) {
            head_statistics[m + i][0] = row_statistics[i][0];
            head_statistics[m + i][1] = row_statistics[i][1];
        }
        for (long c = 0; c < channel_blocks; c++) {
            const uint8_t *tiles = packed_values + 2 * c * key_blocks * TILE;
            multiply((uint8_t *)weights, 2 * keys, tiles, key_blocks, outputs + BLOCK * c, 4 * channels);
        }
        for (long i = 0; i < rows; i++)
            for (long c = 0; c < a->channels; c += BLOCK) {
                const float *from = outputs + i * channels + c;
                __m512 inverse_sum = _mm512_set1_ps(row_statistics[i][1]);
                __m512 low = _mm512_mul_ps(_mm512_load_ps(from), inverse_sum);
                __m512i both = narrow(low, _mm512_mul_ps(_mm512_load_ps(from + 16), inverse_sum));
                _mm512_mask_storeu_epi16(y + (m + i) * a->y_strides.token + c, lanes(a->channels - c), both);
            }
    }
}

/* y = softmax(scale q k^T) v for all heads; the queries of a head are divided into `parts` for threads. Returns 0, or 1
   if memory cannot be allocated. */
long attend(const Attention *a)
{
    long part_queries = BLOCK * ((blocks_of(a->queries) + a->parts - 1) / a->parts), failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        uint8_t *workspace = aligned_alloc(64, (size_t)attention_bytes(a));
        failed = workspace == NULL;
        _tile_loadconfig(&SHAPES);
#pragma omp for schedule(static)
        for (long item = 0; item < a->images * a->heads * a->parts; item++) {
            long first = item % a->parts * part_queries, last = minimum(first + part_queries, a->queries);
            long head = item / a->parts;
            if (!failed && first < last)
                attend_head(a, head / a->heads, head % a->heads, first, last, workspace);
        }
        _tile_release();
        free(workspace);
    }
    return failed;
}

/* x (32, 32) float -> out (rows, columns) bfloat16, scaled, with rows `stride` apart */
static void store_block(const float *x, float scale, bfloat16 *out, long stride, long rows, long columns)
{
    __m512 factor = _mm512_set1_ps(scale);
    for (long i = 0; i < minimum(rows, BLOCK); i++) {
        __m512 low = _mm512_mul_ps(_mm512_load_ps(x + i * BLOCK), factor);
        __m512 high = _mm512_mul_ps(_mm512_load_ps(x + i * BLOCK + 16), factor);
        _mm512_mask_storeu_epi16(out + i * stride, lanes(columns), narrow(low, high));
    }
}

/* x (32, 32) -> out (32, 32), transposed */
static void transpose_floats(const float *x, float *out)
{
    for (int m = 0; m < BLOCK; m += 16)
        for (int c = 0; c < BLOCK; c += 16) {
            __m512i a[16];
            for (int i = 0; i < 16; i++)
                a[i] = _mm512_load_si512(x + (m + i) * BLOCK + c);
            store_transposed(a, (uint8_t *)(out + c * BLOCK + m), 4 * BLOCK, 16, 0xffff);
        }
}

/* bytes of the workspace of `head_gradients`, a multiple of 64 */
static long gradient_bytes(const AttentionGradients *a)
{
    long keys = BLOCK * blocks_of(a->keys), queries = BLOCK * blocks_of(a->queries);
    long channels = BLOCK * blocks_of(a->channels);
    return 2 * (3 * keys + 4 * queries) * channels + 2 * keys * queries + 12 * BLOCK * queries + 12 * queries +
           8 * BLOCK * BLOCK;
}

/* Gradients of a head of an image. With p = exp(scale k q^T - shift) / sum, keys by queries, and d = sum(y dy) of each
   query: dv = p dy, ds = p (v dy^T - d), dk = scale ds q, dq = scale (k^T ds)^T. */
static void head_gradients(const AttentionGradients *a, long image, long head, uint8_t *workspace)
{
    const bfloat16 *q = HEAD(q), *k = HEAD(k), *v = HEAD(v), *y = HEAD(y), *dy = HEAD(dy);
    bfloat16 *dq = HEAD(dq), *dk = HEAD(dk), *dv = HEAD(dv);
    const float(*statistics)[2] = (const float(*)[2])a->statistics + (image * a->heads + head) * a->queries;
    long key_blocks = blocks_of(a->keys), query_blocks = blocks_of(a->queries), channel_blocks = blocks_of(a->channels);
    long keys = BLOCK * key_blocks, queries = BLOCK * query_blocks, channels = BLOCK * channel_blocks;
    bfloat16 *rows_of_k = (bfloat16 *)workspace, *rows_of_v = rows_of_k + keys * channels;
    bfloat16 *k_transposed = rows_of_v + keys * channels;
    uint8_t *packed_queries = (uint8_t *)(k_transposed + keys * channels);
    uint8_t *packed_dy = packed_queries + 2 * queries * channels;
    uint8_t *values_of_q = packed_dy + 2 * queries * channels, *values_of_dy = values_of_q + 2 * queries * channels;
    uint8_t *values_of_ds = values_of_dy + 2 * queries * channels;
    float *logits = (float *)(values_of_ds + 2 * keys * queries), *dp = logits + BLOCK * queries;
    bfloat16 *p = (bfloat16 *)(dp + BLOCK * queries), *ds = p + BLOCK * queries;
    float *shift = (float *)(ds + BLOCK * queries), *inverse_sum = shift + queries, *d = inverse_sum + queries;
    float *block = d + queries, *transposed = block + BLOCK * BLOCK;
    __m512 scale = _mm512_set1_ps(a->scale * LOG2_E);

    copy_padded(k, a->k_strides.token, a->keys, a->channels, rows_of_k);
    copy_padded(v, a->v_strides.token, a->keys, a->channels, rows_of_v);
    transpose_block(k, a->k_strides.token, a->keys, a->channels, k_transposed, keys);
    pack_keys(q, a->q_strides.token, a->queries, a->channels, packed_queries);
    pack_keys(dy, a->dy_strides.token, a->queries, a->channels, packed_dy);
    pack_values(q, a->q_strides.token, a->queries, a->channels, values_of_q);
    pack_values(dy, a->dy_strides.token, a->queries, a->channels, values_of_dy);
    for (long i = 0; i < queries; i++) {
        __m512 sum = _mm512_setzero_ps();
        for (long c = 0; c < a->channels && i < a->queries; c += BLOCK) {
            __mmask32 mask = lanes(a->channels - c);
            __m512i y_pair = _mm512_maskz_loadu_epi16(mask, y + i * a->y_strides.token + c);
            __m512i dy_pair = _mm512_maskz_loadu_epi16(mask, dy + i * a->dy_strides.token + c);
            sum = _mm512_fmadd_ps(lower(y_pair), lower(dy_pair), sum);
            sum = _mm512_fmadd_ps(upper(y_pair), upper(dy_pair), sum);
        }
        d[i] = _mm512_reduce_add_ps(sum);
        shift[i] = i < a->queries ? statistics[i][0] : 0.0f;
        inverse_sum[i] = i < a->queries ? statistics[i][1] : 0.0f; /* padding has no weight */
    }
    for (long n = 0; n < key_blocks; n++) {
        long rows = minimum(a->keys - BLOCK * n, BLOCK), a_stride = 2 * channels, c_stride = 4 * queries;
        for (long m = 0; m < query_blocks; m++) {
            long tiles = 2 * m * channel_blocks * TILE;
            const uint8_t *block_k = (uint8_t *)(rows_of_k + BLOCK * n * channels);
            const uint8_t *block_v = (uint8_t *)(rows_of_v + BLOCK * n * channels);
            multiply(block_k, a_stride, packed_queries + tiles, channel_blocks, logits + BLOCK * m, c_stride);
            multiply(block_v, a_stride, packed_dy + tiles, channel_blocks, dp + BLOCK * m, c_stride);
        }
        for (long i = 0; i < BLOCK; i++)
            for (long m = 0; m < queries; m += BLOCK) {
                __m512 weights[2], slopes[2];
                for (int half = 0; half < 2; half++) {
                    long at = m + 16 * half;
                    __m512 power = _mm512_fmsub_ps(_mm512_load_ps(logits + i * queries + at), scale,
                                                   _mm512_loadu_ps(shift + at));
                    __m512 difference = _mm512_sub_ps(_mm512_load_ps(dp + i * queries + at), _mm512_loadu_ps(d + at));
                    weights[half] = _mm512_mul_ps(exp2_of(power), _mm512_loadu_ps(inverse_sum + at));
                    weights[half] = _mm512_maskz_mov_ps(i < rows ? 0xffff : 0, weights[half]);
                    slopes[half] = _mm512_mul_ps(weights[half], difference);
                }
                _mm512_store_si512(p + i * queries + m, narrow(weights[0], weights[1]));
                _mm512_store_si512(ds + i * queries + m, narrow(slopes[0], slopes[1]));
            }
        for (long i = 0; i < BLOCK; i += 2)
            for (long m = 0; m < queries; m += BLOCK) {
                uint8_t *to = values_of_ds + (m / 16 * key_blocks + n) * TILE + i / 2 * 64;
                const bfloat16 *from = ds + i * queries + m;
                __m512i low, high;
                interleave(_mm512_load_si512(from), _mm512_load_si512(from + queries), &low, &high);
                _mm512_store_si512(to, low);
                _mm512_store_si512(to + TILE * key_blocks, high);
            }
        for (long c = 0; c < channel_blocks; c++) {
            long tiles = 2 * c * query_blocks * TILE, columns = a->channels - BLOCK * c, at = BLOCK * n;
            multiply((uint8_t *)p, 2 * queries, values_of_dy + tiles, query_blocks, block, 4 * BLOCK);
            bfloat16 *to = dv + at * a->dv_strides.token + BLOCK * c;
            store_block(block, 1.0f, to, a->dv_strides.token, a->keys - at, columns);
            multiply((uint8_t *)ds, 2 * queries, values_of_q + tiles, query_blocks, block, 4 * BLOCK);
            to = dk + at * a->dk_strides.token + BLOCK * c;
            store_block(block, a->scale, to, a->dk_strides.token, a->keys - at, columns);
        }
    }
    for (long c = 0; c < channel_blocks; c++)
        for (long m = 0; m < query_blocks; m++) {
            const uint8_t *tiles = values_of_ds + 2 * m * key_blocks * TILE;
            multiply((uint8_t *)(k_transposed + BLOCK * c * keys), 2 * keys, tiles, key_blocks, block, 4 * BLOCK);
            transpose_floats(block, transposed);
            bfloat16 *to = dq + BLOCK * m * a->dq_strides.token + BLOCK * c;
            store_block(transposed, a->scale, to, a->dq_strides.token, a->queries - BLOCK * m, a->channels - BLOCK * c);
        }
}

/* Gradients of queries, keys and values for all heads from the gradient of the outputs. Returns 0, or 1 if memory
   cannot be allocated. */
long attend_backward(const AttentionGradients *a)
{
    long failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        uint8_t *workspace = aligned_alloc(64, (size_t)gradient_bytes(a));
        failed = workspace == NULL;
        _tile_loadconfig(&SHAPES);
#pragma omp for schedule(static)
        for (long item = 0; item < a->images * a->heads; item++)
            if (!failed)
                head_gradients(a, item / a->heads, item % a->heads, workspace);
        _tile_release();
        free(workspace);
    }
    return failed;
}
