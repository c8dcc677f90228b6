// out [M, N] = x [M, K] · weightᵀ: float32 inputs, weights in the tiles of packed.h.
//
// Every output is summed in one order, block by block from the first column, whatever M and however the work is
// split. So a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <vector>

#include "packed.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace fuel::FUEL_ISA {

constexpr int NV = kTile / W;  // vectors of a tile's rows

// Rows of x that are multiplied at a time: what the registers hold.
#if defined(__AVX512BW__)
constexpr int MR = 8, PR = 12;
#elif defined(__AVX2__)
constexpr int MR = 4, PR = 6;
#else
constexpr int MR = 2, PR = 2;
#endif

// ---- inputs ----------------------------------------------------------------------------------

// 32 columns of a row as signed bytes, x ≈ d q. The sums are d Σ q: of all, and of each half.
struct InputScale {
    float d, all, low, high;
};

// Rows in groups of MR: bytes [group][block][MR][32] and scales [group][block][MR].
struct Input {
    const int8_t* bytes;
    const InputScale* scales;
    int blocks;

    const int8_t* bytes_at(int group, int block) const {
        return bytes + (size_t(group) * blocks + block) * MR * kBlock;
    }
    const InputScale* scales_at(int group, int block) const {
        return scales + (size_t(group) * blocks + block) * MR;
    }
};

inline void quantize_block(const float* x, int8_t* q, InputScale& scale) {
    F most = zero(), fault = zero();
    for (int i = 0; i < kBlock; i += W) {
        const F v = load(x + i);
        most = max(most, abs(v));
        fault = fma(v, zero(), fault);  // NaN where a value is not finite
    }
    const float largest_value = largest(most), d = largest_value / 127 + sum(fault);
    if (!(d > 1e-36f)) {  // nothing, too little to divide by, or a fault, which must stay one
        const float none = d >= 0 ? 0 : d;
        std::memset(q, 0, kBlock);
        scale = {none, none, none, none};
        return;
    }
    const F inverse = set1(127 / largest_value);
    F sums[2] = {zero(), zero()};  // of whole numbers, so in any order
    for (int i = 0; i < kBlock; i += W) {
        const F rounded = round(mul(load(x + i), inverse));
        store_i8(q + i, rounded);
        sums[i / 16] = add(sums[i / 16], rounded);
    }
    const float low = sum(sums[0]), high = sum(sums[1]);
    scale = {d, d * (low + high), d * low, d * high};
}

inline Input quantize(const float* x, int rows, int columns, Scratch& scratch) {
    const int blocks = columns / kBlock, groups = (rows + MR - 1) / MR;
    int8_t* bytes = scratch.take<int8_t>(size_t(groups) * blocks * MR * kBlock);
    InputScale* scales = scratch.take<InputScale>(size_t(groups) * blocks * MR);
    const auto one_row = [=](int row) {
        for (int b = 0; b < blocks; b++) {
            const size_t at = (size_t(row / MR) * blocks + b) * MR + row % MR;
            quantize_block(x + size_t(row) * columns + b * kBlock, bytes + at * kBlock, scales[at]);
        }
    };
    if (size_t(rows) * columns < 16384) {
        for (int row = 0; row < rows; row++) one_row(row);
    } else {
        parallel_for(rows, one_row);
    }
    return {bytes, scales, blocks};
}

// ---- quantized weights -----------------------------------------------------------------------

// Whole bytes are made unsigned for an instruction that sums in 32 bits; others take them as they are.
#ifdef FUEL_DOT4
constexpr bool kSigned = false;
#else
constexpr bool kSigned = true;
#endif

// How many products of pairs 16 bits hold: 8 · 2 · 15 · 127, 4 · 2 · 31 · 127, 2 · 2 · 63 · 127 and 2 · 128 · 127 are
// below 32,768.
constexpr int depth_of(Quants q) { return q == Quants::U5 ? 4 : q == Quants::U6 ? 2 : q == Quants::U8 ? 1 : 8; }
constexpr int halves_of(Scales s) { return s == Scales::Super16 ? 2 : 1; }

// A block of a tile as it is packed.
template <class Format> struct Packed {
    static constexpr int depth = depth_of(Format::quants), halves = halves_of(Format::scales);
    static constexpr bool is_signed = kSigned && Format::quants == Quants::U8;
    static constexpr float offset = is_signed ? 0 : float(Format::offset);
    const uint8_t* block;
    const uint8_t* header;

    Packed(const uint8_t* tile, int b) : block(tile + Format::block_at(b)), header(tile + Format::header_at(b)) {}

    // Four columns of the rows that vector v holds.
    template <int g> Bytes quants(int v) const {
        const uint8_t* at = block + v * 4 * W;
        const Bytes low = each_byte(15);
        if constexpr (Format::quants == Quants::U8) {
            return is_signed ? load_bytes(at + g * 64) : xor_(load_bytes(at + g * 64), each_byte(128));
        } else {
            const Bytes line = load_bytes(at + g % 4 * 64);
            const Bytes nibble = g < 4 ? and_(line, low) : and_(shift_right<4>(line), low);
            if constexpr (Format::quants == Quants::U5) {
                const Bytes bits = load_bytes(at + 256);
                if constexpr (g < 4) return or_(nibble, and_(shift_left<4 - g>(bits), each_byte(16)));
                else return or_(nibble, and_(shift_right<g - 4>(bits), each_byte(16)));
            } else if constexpr (Format::quants == Quants::U6) {
                const Bytes bits = load_bytes(at + 256 + g / 4 * 64);
                constexpr int i = g % 4;
                if constexpr (i < 2) return or_(nibble, and_(shift_left<4 - 2 * i>(bits), each_byte(48)));
                else return or_(nibble, and_(shift_right<2 * i - 4>(bits), each_byte(48)));
            } else {
                return nibble;
            }
        }
    }

    // d and m of the rows that vector v holds.
    void scales(int half, int v, F& d, F& m) const {
        const uint8_t* at = block + quant_bytes(Format::quants);
        const auto half_at = [&](const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p) + v * W); };
        if constexpr (Format::scales == Scales::Half) {
            d = half_at(at), m = mul(d, set1(-offset));
        } else if constexpr (Format::scales == Scales::HalfMin) {
            d = half_at(at), m = half_at(at + 32);
        } else if constexpr (Format::scales == Scales::Super) {
            d = mul(half_at(header), load_u8(at + v * W));
            m = mul(mul(half_at(header + 32), load_u8(at + 16 + v * W)), set1(-1));
        } else {
            d = mul(half_at(header), load_i8(reinterpret_cast<const int8_t*>(at) + half * 16 + v * W));
            m = mul(d, set1(-offset));
        }
    }
};

// The same block unpacked once for many rows of x.
template <int depth_, int halves_, bool is_signed_> struct Staged {
    static constexpr int depth = depth_, halves = halves_;
    static constexpr bool is_signed = is_signed_;
    static constexpr size_t bytes = 512 + size_t(halves) * 2 * kTile * sizeof(float);
    uint8_t* block;

    Staged(uint8_t* stage, int b) : block(stage + b * bytes) {}

    template <int g> Bytes quants(int v) const { return load_bytes(block + g * 64 + v * 4 * W); }
    float* scales_at(int half, int v) const {
        return reinterpret_cast<float*>(block + 512) + half * 2 * kTile + v * W;
    }
    void scales(int half, int v, F& d, F& m) const {
        const float* at = scales_at(half, v);
        d = load(at), m = load(at + kTile);
    }

    template <class Source, int g = 0> void take_lines(const Source& source) {
        for (int v = 0; v < NV; v++) store_bytes(block + g * 64 + v * 4 * W, source.template quants<g>(v));
        if constexpr (g < 7) take_lines<Source, g + 1>(source);
    }
    template <class Source> void take(const Source& source) {
        take_lines(source);
        for (int half = 0; half < halves; half++)
            for (int v = 0; v < NV; v++) {
                F d, m;
                source.scales(half, v, d, m);
                store(scales_at(half, v), d), store(scales_at(half, v) + kTile, m);
            }
    }
};

// Sums of lines g to end - 1, in 16 bits at first.
template <int rows, class Source, int g, int end>
[[gnu::always_inline]] inline void sum_lines(
    const Source& source, const int8_t* q, Bytes (&narrow)[rows][NV], I32 (&wide)[rows][NV]
) {
    if constexpr (g < end) {
        constexpr int lines = 8 / Source::halves;
        Bytes w[NV];
        for (int v = 0; v < NV; v++) w[v] = source.template quants<g>(v);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Bytes x = broadcast4(q + r * kBlock + 4 * g);
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++) {
#ifdef FUEL_DOT4
                wide[r][v] = dot4(g % lines ? wide[r][v] : zero_i32(), w[v], x);
#else
                const Bytes p = Source::is_signed ? signed_pairs(w[v], x) : pairs(w[v], x);
                narrow[r][v] = in_register(g % Source::depth ? add16(narrow[r][v], p) : p);
                if constexpr ((g + 1) % Source::depth == 0) {
                    constexpr bool is_first = g % lines < Source::depth;
                    wide[r][v] = is_first ? widen(narrow[r][v]) : add32(wide[r][v], widen(narrow[r][v]));
                }
#endif
            }
        }
        sum_lines<rows, Source, g + 1, end>(source, q, narrow, wide);
    }
}

template <int rows, class Source, int half>
[[gnu::always_inline]] inline void add_half(
    const Source& source, const int8_t* q, const InputScale* x, float* sums
) {
    constexpr int lines = 8 / Source::halves;
    Bytes narrow[rows][NV];
    I32 wide[rows][NV];
    sum_lines<rows, Source, half * lines, (half + 1) * lines>(source, q, narrow, wide);
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) {
        F d, m;
        source.scales(half, v, d, m);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            float* out = sums + r * kTile + v * W;
            const float total = Source::halves == 1 ? x[r].all : half ? x[r].high : x[r].low;
            const F scaled = fma(mul(to_float(wide[r][v]), set1(x[r].d)), d, load(out));
            store(out, fma(set1(total), m, scaled));
        }
    }
}

// Blocks first to end - 1 of a tile for `rows` rows of a group, added to sums [rows][16]: these stay in memory,
// since the sums of a block take all registers.
template <int rows, class Source, class Stage>
void add_blocks(Stage* tile, int from, const Input& x, int group, int first, int end, float* sums) {
    for (int b = first; b < end; b++) {
        const Source source(tile, b - from);
        const int8_t* q = x.bytes_at(group, b);
        const InputScale* scales = x.scales_at(group, b);
        add_half<rows, Source, 0>(source, q, scales, sums);
        if constexpr (Source::halves == 2) add_half<rows, Source, 1>(source, q, scales, sums);
    }
}

template <int rows, class Source, class Stage>
void add_group(int count, Stage* tile, int from, const Input& x, int group, int first, int end, float* sums) {
    if constexpr (rows > 1)
        if (count < rows)
            return add_group<rows - 1, Source>(count, tile, from, x, group, first, end, sums);
    add_blocks<rows, Source>(tile, from, x, group, first, end, sums);
}

// What a product writes: rows of `stride` floats, plus a bias and what is there to add to, where given.
struct Output {
    float* data;
    size_t stride;
    const float* bias;
    const float* residual;

    void put(int row, int column, int count, const float* sums) const {
        const size_t at = row * stride + column;
        if (count == kTile) {
            for (int v = 0; v < kTile; v += W) {
                F value = load(sums + v);
                if (bias) value = add(value, load(bias + column + v));
                if (residual) value = add(value, load(residual + at + v));
                store(data + at + v, value);
            }
            return;
        }
        for (int i = 0; i < count; i++) {
            float value = sums[i];
            if (bias) value += bias[column + i];
            if (residual) value += residual[at + i];
            data[at + i] = value;
        }
    }
};

constexpr int kStage = 16 << 10;  // bytes of a tile that are unpacked at a time: half of a small first-level cache
constexpr int kDirect = 16;        // rows of x up to which unpacking again costs less than keeping what is unpacked
constexpr int kRows = 192;         // rows of x that one unpacking serves: their bytes stay in the second-level cache

template <class Format>
void quantized_tile(const uint8_t* tile, const Input& x, int m, int column, int width, const Output& out) {
    using Direct = Packed<Format>;
    using Unpacked = Staged<Direct::depth, Direct::halves, Direct::is_signed>;
    alignas(64) float sums[kRows * kTile];
    if (m <= kDirect) {
        std::fill(sums, sums + m * kTile, 0.0f);
        for (int r = 0; r < m; r += MR)
            add_group<MR, Direct>(std::min(MR, m - r), tile, 0, x, r / MR, 0, x.blocks, sums + r * kTile);
        for (int row = 0; row < m; row++) out.put(row, column, width, sums + row * kTile);
        return;
    }
    alignas(64) uint8_t stage[kStage];
    constexpr int chunk = kStage / Unpacked::bytes;
    for (int row = 0; row < m; row += kRows) {
        const int rows = std::min(kRows, m - row);
        std::fill(sums, sums + rows * kTile, 0.0f);
        for (int first = 0; first < x.blocks; first += chunk) {
            const int end = std::min(first + chunk, x.blocks);
            for (int b = first; b < end; b++) Unpacked(stage, b - first).take(Direct(tile, b));
            for (int r = 0; r < rows; r += MR)
                add_group<MR, Unpacked>(
                    std::min(MR, rows - r), stage, first, x, (row + r) / MR, first, end, sums + r * kTile
                );
        }
        for (int r = 0; r < rows; r++) out.put(row + r, column, width, sums + r * kTile);
    }
}

// ---- weights as floats -----------------------------------------------------------------------

// Columns of a plain tile.
template <class E> struct PlainTile {
    static constexpr bool is_float = sizeof(typename E::Stored) == sizeof(float);
    const typename E::Stored* w;

    explicit PlainTile(const uint8_t* tile) : w(reinterpret_cast<const typename E::Stored*>(tile)) {}

    // take(k, column) for each of `count` columns, from the first on.
    template <class Take> [[gnu::always_inline]] void columns(int first, int count, const Take& take) const {
        for (int k = 0; k < count; k++) {
            F column[NV];
            for (int v = 0; v < NV; v++) column[v] = E::load(w + size_t(first + k) * kTile + v * W);
            take(k, column);
        }
    }
};

// `count` columns times the same of `rows` rows of x, added to sums [rows][16].
template <int rows, class Source>
void add_columns(const Source& source, int first, int count, const float* x, size_t stride, float* sums) {
    F out[rows][NV];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) out[r][v] = load(sums + r * kTile + v * W);
    source.columns(first, count, [&](int k, const F* column) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const F value = set1(x[r * stride + k]);
#pragma GCC unroll 2
            for (int v = 0; v < NV; v++) out[r][v] = fma(column[v], value, out[r][v]);
        }
    });
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < NV; v++) store(sums + r * kTile + v * W, out[r][v]);
}

template <int rows, class Source>
void add_some(int some, const Source& source, int first, int count, const float* x, size_t stride, float* sums) {
    if constexpr (rows > 1)
        if (some < rows) return add_some<rows - 1>(some, source, first, count, x, stride, sums);
    add_columns<rows>(source, first, count, x, stride, sums);
}

template <class Source>
void float_tile(const uint8_t* tile, const float* x, int k, int m, int column, int width, const Output& out) {
    const Source source(tile);
    constexpr int chunk = kStage / (kTile * sizeof(float));
    alignas(64) float sums[kRows * kTile];
    alignas(64) float stage[Source::is_float ? 1 : chunk * kTile];
    for (int row = 0; row < m; row += kRows) {
        const int rows = std::min(kRows, m - row);
        const bool staged = !Source::is_float && rows > PR;
        std::fill(sums, sums + rows * kTile, 0.0f);
        for (int first = 0; first < k; first += chunk) {
            const int count = std::min(chunk, k - first);
            if (staged)
                source.columns(first, count, [&](int i, const F* values) {
                    for (int v = 0; v < NV; v++) store(stage + i * kTile + v * W, values[v]);
                });
            for (int r = 0; r < rows; r += PR) {
                const float* part = x + size_t(row + r) * k + first;
                const int some = std::min(PR, rows - r);
                if (staged) {
                    const PlainTile<F32> wide(reinterpret_cast<const uint8_t*>(stage));
                    add_some<PR>(some, wide, 0, count, part, k, sums + r * kTile);
                } else {
                    add_some<PR>(some, source, first, count, part, k, sums + r * kTile);
                }
            }
        }
        for (int r = 0; r < rows; r++) out.put(row + r, column, width, sums + r * kTile);
    }
}

// ---- the product -----------------------------------------------------------------------------

inline void one_tile(const Part& part, int i, const float* x, const Input& q, int k, int m, int column, const Output& out) {
    const int width = std::min(kTile, part.rows - i * kTile);
    const uint8_t* tile = part.tile(i);
    switch (part.kind) {
    case Kind::F32: return float_tile<PlainTile<F32>>(tile, x, k, m, column, width, out);
    case Kind::Bf16: return float_tile<PlainTile<Bf16>>(tile, x, k, m, column, width, out);
    case Kind::F16: return float_tile<PlainTile<F16>>(tile, x, k, m, column, width, out);
    case Kind::Q4_0: return quantized_tile<Format<Kind::Q4_0>>(tile, q, m, column, width, out);
    case Kind::Q4_1: return quantized_tile<Format<Kind::Q4_1>>(tile, q, m, column, width, out);
    case Kind::Q5_0: return quantized_tile<Format<Kind::Q5_0>>(tile, q, m, column, width, out);
    case Kind::Q5_1: return quantized_tile<Format<Kind::Q5_1>>(tile, q, m, column, width, out);
    case Kind::Q8_0: return quantized_tile<Format<Kind::Q8_0>>(tile, q, m, column, width, out);
    case Kind::Q4_K: return quantized_tile<Format<Kind::Q4_K>>(tile, q, m, column, width, out);
    case Kind::Q5_K: return quantized_tile<Format<Kind::Q5_K>>(tile, q, m, column, width, out);
    case Kind::Q6_K: return quantized_tile<Format<Kind::Q6_K>>(tile, q, m, column, width, out);
    }
}

inline void linear(const Matrix& w, const float* x, int m, const float* residual, float* data) {
    Scratch& scratch = Scratch::of_thread();
    const Scratch::Scope scope(scratch);
    Input q{};
    for (const Part& part : w.parts)
        if (!is_plain(part.kind) && !q.bytes) q = quantize(x, m, w.columns, scratch);
    const Output out{data, size_t(w.rows), w.bias.empty() ? nullptr : w.bias.data(), residual};
    // A few tiles at a time, so that a thread streams; more pieces than threads, so that none waits long.
    const int tiles = w.tiles(), some = std::max(1, std::min(8, tiles / (4 * threads())));
    parallel_for((tiles + some - 1) / some, [&](int piece) {
        int part = 0, first = 0, column = 0;
        for (int i = piece * some; i < std::min(tiles, (piece + 1) * some); i++) {
            while (i - first >= w.parts[part].count()) {
                first += w.parts[part].count(), column += w.parts[part].rows, part++;
            }
            one_tile(w.parts[part], i - first, x, q, w.columns, m, column + (i - first) * kTile, out);
        }
    });
}

}  // namespace fuel::FUEL_ISA
