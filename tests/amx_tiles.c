/* The instructions of AMX that rlx's kernels use, as Intel's manual states them, for processors without. emulated_amx.py builds
   this and puts its functions in place of LLVM's intrinsics. Each thread has tiles of its own. Whatever the manual forbids is a
   fault: it is counted, described, and changes nothing. */
#include <immintrin.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { TILES = 8, ROWS = 16, BYTES = 64, LANES = BYTES / 4, SAID = 4096, FLUSH = 0x8040 /* denormals, both ways */ };

typedef struct {
    uint8_t at[ROWS][BYTES];
} Tile;

static _Thread_local Tile tiles[TILES];
static _Thread_local uint8_t rows[TILES];
static _Thread_local uint16_t widths[TILES]; /* bytes of a row */
static _Thread_local int configured;

/* counts over all threads */
static int64_t products, configurations, faults, live; /* live: threads that have not released the unit */
static char said[SAID];
static size_t length;

static void fault(const char *format, ...) {
    static char busy;
    __atomic_add_fetch(&faults, 1, __ATOMIC_RELAXED);
    while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {
    }
    if (length < SAID - 200) {
        va_list values;
        va_start(values, format);
        length += vsnprintf(said + length, 199, format, values);
        va_end(values);
        said[length++] = '\n';
        said[length] = 0;
    }
    __atomic_clear(&busy, __ATOMIC_RELEASE);
}

static int usable(const char *name, int tile) {
    if (configured && tile < TILES && rows[tile])
        return 1;
    fault("%s of register %d: %s", name, tile, configured ? "not configured" : "the unit is released");
    return 0;
}

void rlx_amx_ldtilecfg(const uint8_t *table) {
    int wrong = table[0] != 1;
    uint16_t width[TILES];
    memcpy(width, table + 16, sizeof width);
    for (int n = 1; n < 64; n++)
        if (n < 16 || (n >= 32 && n < 48) || n >= 56)
            wrong |= table[n] != 0;
    for (int n = 0; n < TILES; n++)
        wrong |= width[n] > BYTES || table[48 + n] > ROWS || !width[n] != !table[48 + n];
    if (wrong) {
        fault("ldtilecfg: a malformed table");
        return;
    }
    if (configured)
        fault("ldtilecfg: the unit was not released");
    else
        __atomic_add_fetch(&live, 1, __ATOMIC_RELAXED);
    memcpy(widths, width, sizeof width);
    memcpy(rows, table + 48, TILES);
    memset(tiles, 0, sizeof tiles);
    configured = 1;
    __atomic_add_fetch(&configurations, 1, __ATOMIC_RELAXED);
}

void rlx_amx_tilerelease(void) {
    if (configured)
        __atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
    configured = 0;
    memset(rows, 0, sizeof rows);
}

void rlx_amx_tilezero(uint8_t tile) {
    if (usable("tilezero", tile))
        memset(&tiles[tile], 0, sizeof(Tile));
}

void rlx_amx_tileloadd64(uint8_t tile, const uint8_t *from, int64_t stride) {
    if (usable("tileloadd64", tile))
        for (int r = 0; r < rows[tile]; r++)
            memcpy(tiles[tile].at[r], from + r * stride, widths[tile]);
}

void rlx_amx_tileloaddt164(uint8_t tile, const uint8_t *from, int64_t stride) { /* a hint to the caches */
    rlx_amx_tileloadd64(tile, from, stride);
}

void rlx_amx_tilestored64(uint8_t tile, uint8_t *to, int64_t stride) {
    if (usable("tilestored64", tile))
        for (int r = 0; r < rows[tile]; r++)
            memcpy(to + r * stride, tiles[tile].at[r], widths[tile]);
}

static int fit(const char *name, int sums, int a, int b) {
    if (!usable(name, sums) || !usable(name, a) || !usable(name, b))
        return 0;
    if (sums == a || sums == b || a == b)
        fault("%s of registers %d, %d, %d: one is named twice", name, sums, a, b);
    else if (rows[sums] != rows[a] || widths[sums] != widths[b] || widths[a] != 4 * rows[b] || widths[b] % 4)
        fault("%s: %d x %d bytes += %d x %d * %d x %d", name, rows[sums], widths[sums], rows[a], widths[a], rows[b], widths[b]);
    else {
        __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
        return 1;
    }
    return 0;
}

static __m512 upper(__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xFFFF0000))); }

static __m512 lower(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

/* Products of first elements and of second ones are summed apart, and added to the sums at the end. */
void rlx_amx_tdpbf16ps(uint8_t sums, uint8_t a, uint8_t b) {
    if (!fit("tdpbf16ps", sums, a, b))
        return;
    unsigned before = _mm_getcsr();
    _mm_setcsr((before | FLUSH) & ~0x6000u); /* to nearest */
    for (int m = 0; m < rows[sums]; m++) {
        __m512 first = _mm512_setzero_ps(), second = first;
        for (int k = 0; k < rows[b]; k++) {
            int pair;
            memcpy(&pair, tiles[a].at[m] + 4 * k, 4);
            __m512i left = _mm512_set1_epi32(pair), right = _mm512_loadu_si512(tiles[b].at[k]);
            first = _mm512_fmadd_ps(lower(left), lower(right), first);
            second = _mm512_fmadd_ps(upper(left), upper(right), second);
        }
        __m512 total = _mm512_add_ps(_mm512_loadu_ps(tiles[sums].at[m]), _mm512_add_ps(first, second));
        _mm512_mask_storeu_ps(tiles[sums].at[m], (__mmask16)((1u << widths[sums] / 4) - 1), total);
    }
    _mm_setcsr(before);
}

/* Four bytes without a sign, by four with one. */
void rlx_amx_tdpbusd(uint8_t sums, uint8_t a, uint8_t b) {
    if (!fit("tdpbusd", sums, a, b))
        return;
    for (int m = 0; m < rows[sums]; m++) {
        uint32_t total[LANES];
        memcpy(total, tiles[sums].at[m], BYTES);
        for (int k = 0; k < rows[b]; k++)
            for (int n = 0; n < LANES; n++)
                for (int i = 0; i < 4; i++)
                    total[n] += (uint32_t)(tiles[a].at[m][4 * k + i] * (int8_t)tiles[b].at[k][4 * n + i]);
        memcpy(tiles[sums].at[m], total, widths[sums]);
    }
}

/* The rest is called while no kernel runs. `counts`: products, configurations, faults, threads that have not released the unit.
   `text`: SAID bytes, for what was wrong. */
void rlx_amx_read(int64_t *counts, char *text) {
    counts[0] = products, counts[1] = configurations, counts[2] = faults, counts[3] = live;
    memcpy(text, said, SAID);
}

void rlx_amx_forget_faults(void) {
    faults = 0, length = 0, said[0] = 0;
}
