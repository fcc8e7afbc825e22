/* Kernels for inference in bfloat16 on x86-64 with AVX512-BF16; attention also needs AMX. `native.py` compiles them,
   `nn/kernels.py` calls them and says what each computes.

   Every row is computed by itself, in one order: results do not depend on threads or on other rows. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bfloat16;
typedef struct { float constant[32], linear[32], square[32]; } Table; /* see `gelu_of` */
typedef struct { __m512 low[3], high[3]; } LoadedTable;
typedef struct { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } TileShapes;
typedef struct { long image, head, token; } Strides; /* in elements */
typedef struct {
    const bfloat16 *q, *k, *v;
    bfloat16 *y;
    Strides q_strides, k_strides, v_strides, y_strides;
    long images, heads, queries, keys, channels, parts;
    float scale;
} Attention;

enum { ROWS = 16, TILE = 1024, BLOCK = 32 }; /* rows and bytes of a tile; queries, and channels or keys, of a block */
enum { WORTH_THREADS = 1 << 14 };            /* elements from which on a loop is shared by threads */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

static const TileShapes SHAPES = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* the compiler does not see what tiles read and write */
#define BARRIER() __asm__ volatile("" ::: "memory")

static inline long least(long a, long b) { return a < b ? a : b; }
static inline long blocks_of(long count) { return (count + BLOCK - 1) / BLOCK; }
static inline __mmask32 lanes(long count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }
static inline __m512 widen(__m256i x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* Asks the system for tiles; 0 where it grants them. */
long request_tiles(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA); }

/* out = (x - mean) / sqrt(variance + eps) * weight + bias for each of `rows`; `width` is a multiple of 16 */
void layer_norm(const float *x, const float *weight, const float *bias, bfloat16 *out, long rows, long width, float eps)
{
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long i = 0; i < rows; i++) {
        const float *row = x + i * width;
        __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
        for (long c = 0; c < width; c += 16)
            sum = _mm512_add_ps(sum, _mm512_loadu_ps(row + c));
        __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)width);
        for (long c = 0; c < width; c += 16) {
            __m512 rest = _mm512_sub_ps(_mm512_loadu_ps(row + c), mean);
            squares = _mm512_fmadd_ps(rest, rest, squares);
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
#pragma omp parallel for schedule(static) if (count > WORTH_THREADS)
    for (long i = 0; i < count; i += 16) {
        __mmask16 mask = (__mmask16)lanes(least(count - i, 16));
        __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, x + i), widen(_mm256_maskz_loadu_epi16(mask, y + i)));
        _mm512_mask_storeu_ps(out + i, mask, sum);
    }
}

/* x f(x) for an f with f(-x) = 1 - f(x), which has g(|x|) = f(|x|) - 1/2 by parabolas around each quarter up to 7.75:
   x f(x) = x / 2 + |x| g(|x|) */
static inline __m512 gelu_of(__m512 x, const LoadedTable *table)
{
    const __m512 to_quarters = _mm512_set1_ps(2097152.0f); /* 2^21: a sum with it has steps of 1/4 */
    __m512 size = _mm512_abs_ps(x), near = _mm512_min_ps(size, _mm512_set1_ps(7.75f));
    __m512 quarter = _mm512_add_ps(near, to_quarters), rest = _mm512_sub_ps(near, _mm512_sub_ps(quarter, to_quarters));
    __m512i index = _mm512_castps_si512(quarter);
    __m512 y = _mm512_permutex2var_ps(table->low[2], index, table->high[2]);
    y = _mm512_fmadd_ps(y, rest, _mm512_permutex2var_ps(table->low[1], index, table->high[1]));
    y = _mm512_fmadd_ps(y, rest, _mm512_permutex2var_ps(table->low[0], index, table->high[0]));
    return _mm512_fmadd_ps(y, size, _mm512_mul_ps(x, _mm512_set1_ps(0.5f)));
}

/* x = x f(x) in place */
void gelu(bfloat16 *x, const Table *table, long count)
{
    const float *columns[3] = {table->constant, table->linear, table->square};
    LoadedTable loaded;
    for (int i = 0; i < 3; i++) {
        loaded.low[i] = _mm512_loadu_ps(columns[i]);
        loaded.high[i] = _mm512_loadu_ps(columns[i] + 16);
    }
#pragma omp parallel for schedule(static) if (count > WORTH_THREADS)
    for (long i = 0; i < count; i += 32) {
        __mmask32 mask = lanes(count - i);
        __m512i both = _mm512_maskz_loadu_epi16(mask, x + i);
        __m512 low = gelu_of(widen(_mm512_castsi512_si256(both)), &loaded);
        __m512 high = gelu_of(widen(_mm512_extracti64x4_epi64(both, 1)), &loaded);
        _mm512_mask_storeu_epi16(x + i, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* 2^x, to 1e-4 of it */
static inline __m512 exp2_of(__m512 x)
{
    __m512 whole = _mm512_roundscale_ps(x, 8), rest = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(0.05514708f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.24255303f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.69326007f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(0.99993224f));
    return _mm512_scalef_ps(y, whole);
}

/* `rows` <= 16 rows of up to 32 channels -> a tile of pairs of channels (16) by rows (16); what is not there is zero */
static void pack_transposed(const bfloat16 *from, long stride, long rows, __mmask32 channels, uint8_t *tile)
{
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = i < rows ? _mm512_maskz_loadu_epi16(channels, from + i * stride) : _mm512_setzero_si512();
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
        _mm512_store_si512(tile + 64 * i, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_store_si512(tile + 64 * (i + 8), _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    }
}

/* keys (n, c) -> tiles by block of 16 keys, then of 32 channels */
static void pack_keys(const bfloat16 *k, long stride, long keys, long channels, uint8_t *tiles)
{
    for (long n = 0; n < BLOCK * blocks_of(keys); n += ROWS)
        for (long c = 0; c < channels; c += BLOCK, tiles += TILE)
            pack_transposed(k + n * stride + c, stride, least(keys - n, ROWS), lanes(channels - c), tiles);
}

/* values (n, c) -> tiles of pairs of keys (16) by channels (16), by block of 16 channels, then of 32 keys */
static void pack_values(const bfloat16 *v, long stride, long keys, long channels, uint8_t *tiles)
{
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (long c = 0; c < channels; c += BLOCK, tiles += 2 * TILE * blocks_of(keys))
        for (long n = 0; n < BLOCK * blocks_of(keys); n += 2) {
            __mmask32 first = n < keys ? lanes(channels - c) : 0, second = n + 1 < keys ? lanes(channels - c) : 0;
            __m512i even = _mm512_maskz_loadu_epi16(first, v + n * stride + c);
            __m512i odd = _mm512_maskz_loadu_epi16(second, v + (n + 1) * stride + c);
            uint8_t *to = tiles + n / BLOCK * TILE + n % BLOCK * 32;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to + TILE * blocks_of(keys), _mm512_permutex2var_epi16(even, high, odd));
        }
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

/* Logits of a row -> exp(scale (logit - the largest)) in bfloat16, 0 beyond the keys; returns their sum. */
static inline float exponentials(const float *logits, long keys, __m512 scale, bfloat16 *out)
{
    __m512 most = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
    for (long n = 0; n < keys; n += 16)
        most = _mm512_mask_max_ps(most, (__mmask16)lanes(least(keys - n, 16)), most, _mm512_load_ps(logits + n));
    __m512 shift = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(most)), scale);
    for (long n = 0; n < keys; n += BLOCK) {
        __mmask32 mask = lanes(keys - n);
        __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(logits + n), scale, shift));
        __m512 high = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(logits + n + 16), scale, shift));
        low = _mm512_maskz_mov_ps((__mmask16)mask, low);
        high = _mm512_maskz_mov_ps((__mmask16)(mask >> 16), high);
        sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
        _mm512_store_si512(out + n, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    return _mm512_reduce_add_ps(sum);
}

/* bytes of what `attend_head` works in: keys, values, queries, exponentials, logits, answers */
static long room_bytes(const Attention *a)
{
    long keys = BLOCK * blocks_of(a->keys), channels = BLOCK * blocks_of(a->channels);
    return 4 * keys * channels + 2 * BLOCK * channels + 6 * BLOCK * keys + 4 * BLOCK * channels;
}

/* softmax(scale q k^T) v of the queries from `first` to before `last` of a head of an image */
static void attend_head(const Attention *a, long image, long head, long first, long last, uint8_t *room)
{
    const bfloat16 *q = a->q + image * a->q_strides.image + head * a->q_strides.head;
    const bfloat16 *k = a->k + image * a->k_strides.image + head * a->k_strides.head;
    const bfloat16 *v = a->v + image * a->v_strides.image + head * a->v_strides.head;
    bfloat16 *y = a->y + image * a->y_strides.image + head * a->y_strides.head;
    long key_blocks = blocks_of(a->keys), channel_blocks = blocks_of(a->channels);
    long keys = BLOCK * key_blocks, channels = BLOCK * channel_blocks;
    uint8_t *packed_keys = room, *packed_values = packed_keys + 2 * keys * channels;
    bfloat16 *asking = (bfloat16 *)(packed_values + 2 * keys * channels), *weights = asking + BLOCK * channels;
    float *logits = (float *)(weights + BLOCK * keys), *answers = logits + BLOCK * keys, sums[BLOCK];
    __m512 scale = _mm512_set1_ps(a->scale * 1.44269504f); /* log2(e): exponentials are powers of two */

    pack_keys(k, a->k_strides.token, a->keys, a->channels, packed_keys);
    pack_values(v, a->v_strides.token, a->keys, a->channels, packed_values);
    for (long m = first; m < last; m += BLOCK) {
        long rows = least(last - m, BLOCK);
        for (long i = 0; i < BLOCK; i++)
            for (long c = 0; c < channels; c += BLOCK) {
                __mmask32 mask = i < rows ? lanes(a->channels - c) : 0;
                const bfloat16 *from = q + (m + i) * a->q_strides.token + c;
                _mm512_store_si512(asking + i * channels + c, _mm512_maskz_loadu_epi16(mask, from));
            }
        for (long n = 0; n < key_blocks; n++) {
            const uint8_t *tiles = packed_keys + 2 * n * channel_blocks * TILE;
            multiply((uint8_t *)asking, 2 * channels, tiles, channel_blocks, logits + BLOCK * n, 4 * keys);
        }
        for (long i = 0; i < rows; i++)
            sums[i] = exponentials(logits + i * keys, a->keys, scale, weights + i * keys);
        for (long c = 0; c < channel_blocks; c++) {
            const uint8_t *tiles = packed_values + 2 * c * key_blocks * TILE;
            multiply((uint8_t *)weights, 2 * keys, tiles, key_blocks, answers + BLOCK * c, 4 * channels);
        }
        for (long i = 0; i < rows; i++)
            for (long c = 0; c < a->channels; c += BLOCK) {
                const float *from = answers + i * channels + c;
                __m512 share = _mm512_set1_ps(1.0f / sums[i]), low = _mm512_mul_ps(_mm512_load_ps(from), share);
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_load_ps(from + 16), share), low);
                _mm512_mask_storeu_epi16(y + (m + i) * a->y_strides.token + c, lanes(a->channels - c), both);
            }
    }
}

/* y = softmax(scale q k^T) v; the queries of each head are shared out in `parts`. Returns 0, or 1 without memory. */
long attend(const Attention *a)
{
    long each = BLOCK * ((blocks_of(a->queries) + a->parts - 1) / a->parts), failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        uint8_t *room = aligned_alloc(64, (size_t)room_bytes(a));
        failed = room == NULL;
        _tile_loadconfig(&SHAPES);
#pragma omp for schedule(static)
        for (long item = 0; item < a->images * a->heads * a->parts; item++) {
            long first = item % a->parts * each, last = least(first + each, a->queries), head = item / a->parts;
            if (!failed && first < last)
                attend_head(a, head / a->heads, head % a->heads, first, last, room);
        }
        _tile_release();
        free(room);
    }
    return failed;
}
