#include "packed.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "parallel.h"

namespace fuel {

Buffer::Buffer(size_t bytes) : size_(bytes) {
    constexpr size_t huge = size_t(2) << 20;
    const size_t align = bytes >= huge ? huge : 64;
    void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!p) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (align == huge) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    data_.reset(static_cast<uint8_t*>(p));
}

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

size_t Matrix::bytes() const {
    size_t total = bias.size() * sizeof(float);
    for (const Part& part : parts) total += part.tiles.size();
    return total;
}

int Matrix::tiles() const {
    int total = 0;
    for (const Part& part : parts) total += part.count();
    return total;
}

namespace {

// A GGML block of one row (ggml-common.h of llama.cpp), taken apart. A value is d q + m, in the terms of Scales.
struct Block {
    uint8_t q[256];
    uint16_t d, m;        // half precision
    uint8_t s[16], t[8];  // of a super-block
};

struct Stored {
    int values, bytes;
    void (*take_apart)(const uint8_t*, Block&);
};

uint16_t half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return bits;
}

float wide(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return float(half);
}

void nibbles(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 16; i++) q[i] = p[i] & 15, q[i + 16] = p[i] >> 4;
}

void fifth_bits(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 32; i++) q[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

void q4_0(const uint8_t* p, Block& b) { b.d = half_at(p), nibbles(p + 2, b.q); }
void q4_1(const uint8_t* p, Block& b) { b.d = half_at(p), b.m = half_at(p + 2), nibbles(p + 4, b.q); }
void q5_0(const uint8_t* p, Block& b) { b.d = half_at(p), nibbles(p + 6, b.q), fifth_bits(p + 2, b.q); }
void q5_1(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2), nibbles(p + 8, b.q), fifth_bits(p + 4, b.q);
}
void q8_0(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    std::memcpy(b.q, p + 2, 32);
}

// Twelve bytes: eight scales and eight minima of six bits.
void six_bit_pairs(const uint8_t* p, Block& b) {
    for (int i = 0; i < 4; i++) {
        b.s[i] = p[i] & 63, b.t[i] = p[i + 4] & 63;
        b.s[i + 4] = (p[i + 8] & 15) | (p[i] >> 6) << 4;
        b.t[i + 4] = (p[i + 8] >> 4) | (p[i + 4] >> 6) << 4;
    }
}

void q4_k(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2);
    six_bit_pairs(p + 4, b);
    for (int i = 0; i < 128; i++) {  // 32 bytes hold two runs of 32 values
        uint8_t* q = b.q + i / 32 * 64 + i % 32;
        q[0] = p[16 + i] & 15, q[32] = p[16 + i] >> 4;
    }
}
void q5_k(const uint8_t* p, Block& b) {
    b.d = half_at(p), b.m = half_at(p + 2);
    six_bit_pairs(p + 4, b);
    for (int i = 0; i < 128; i++) {
        uint8_t* q = b.q + i / 32 * 64 + i % 32;
        const uint8_t high = p[16 + i % 32] >> i / 32 * 2;
        q[0] = (p[48 + i] & 15) | (high & 1) << 4, q[32] = (p[48 + i] >> 4) | (high >> 1 & 1) << 4;
    }
}
void q6_k(const uint8_t* p, Block& b) {
    b.d = half_at(p + 208);
    std::memcpy(b.s, p + 192, 16);
    for (int i = 0; i < 128; i++) {  // 64 bytes hold two runs of 64 values
        uint8_t* q = b.q + i / 64 * 128 + i % 64;
        q[0] = p[i] & 15, q[64] = p[i] >> 4;
    }
    for (int i = 0; i < 64; i++)  // 32 bytes hold four runs of 32 upper pairs
        for (int run = 0; run < 4; run++)
            b.q[i / 32 * 128 + run * 32 + i % 32] |= (p[128 + i] >> 2 * run & 3) << 4;
}

Stored stored(Kind kind) {
    switch (kind) {
    case Kind::Q4_0: return {32, 18, q4_0};
    case Kind::Q4_1: return {32, 20, q4_1};
    case Kind::Q5_0: return {32, 22, q5_0};
    case Kind::Q5_1: return {32, 24, q5_1};
    case Kind::Q8_0: return {32, 34, q8_0};
    case Kind::Q4_K: return {256, 144, q4_k};
    case Kind::Q5_K: return {256, 176, q5_k};
    case Kind::Q6_K: return {256, 210, q6_k};
    case Kind::F32: return {1, 4, nullptr};
    default: return {1, 2, nullptr};
    }
}

void put_quants(Quants quants, const uint8_t* q, int row, uint8_t* to) {
    for (int k = 0; k < kBlock; k++) {
        const int g = k / 4, at = row * 4 + k % 4;
        if (quants == Quants::U8) {
            to[g * 64 + at] = q[k];
            continue;
        }
        to[g % 4 * 64 + at] |= (q[k] & 15) << (g < 4 ? 0 : 4);
        if (quants == Quants::U5) to[256 + at] |= (q[k] >> 4) << g;
        if (quants == Quants::U6) to[256 + g / 4 * 64 + at] |= (q[k] >> 4) << 2 * (g % 4);
    }
}

void put_half(uint8_t* to, int row, uint16_t bits) { std::memcpy(to + 2 * row, &bits, 2); }

template <class Format> void put_scales(const Block& b, int j, int row, uint8_t* header, uint8_t* to) {
    switch (Format::scales) {
    case Scales::Half: put_half(to, row, b.d); break;
    case Scales::HalfMin: put_half(to, row, b.d), put_half(to + 32, row, b.m); break;
    case Scales::Super:
        put_half(header, row, b.d), put_half(header + 32, row, b.m);
        to[row] = b.s[j], to[16 + row] = b.t[j];
        break;
    case Scales::Super16:
        put_half(header, row, b.d);
        to[row] = b.s[2 * j], to[16 + row] = b.s[2 * j + 1];
        break;
    }
}

template <Kind kind> void pack_tile(const uint8_t* data, size_t stride, int rows, int columns, uint8_t* tile) {
    using F = Format<kind>;
    const Stored form = stored(kind);
    for (int row = 0; row < rows; row++)
        for (int unit = 0; unit < columns / form.values; unit++) {
            Block block;
            form.take_apart(data + row * stride + size_t(unit) * form.bytes, block);
            for (int j = 0; j < form.values / kBlock; j++) {
                const size_t b = size_t(unit) * (form.values / kBlock) + j;
                uint8_t* to = tile + F::block_at(b);
                put_quants(F::quants, block.q + j * kBlock, row, to);
                put_scales<F>(block, j, row, tile + F::header_at(b), to + quant_bytes(F::quants));
            }
        }
}

template <class T> void pack_plain(const uint8_t* data, int rows, int columns, uint8_t* tile) {
    const T* from = reinterpret_cast<const T*>(data);
    T* to = reinterpret_cast<T*>(tile);
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < columns; k++) to[size_t(k) * kTile + row] = from[size_t(row) * columns + k];
}

using PackTile = void (*)(const uint8_t*, size_t, int, int, uint8_t*);

PackTile pack_tile_of(Kind kind) {
    switch (kind) {
    case Kind::Q4_0: return pack_tile<Kind::Q4_0>;
    case Kind::Q4_1: return pack_tile<Kind::Q4_1>;
    case Kind::Q5_0: return pack_tile<Kind::Q5_0>;
    case Kind::Q5_1: return pack_tile<Kind::Q5_1>;
    case Kind::Q8_0: return pack_tile<Kind::Q8_0>;
    case Kind::Q4_K: return pack_tile<Kind::Q4_K>;
    case Kind::Q5_K: return pack_tile<Kind::Q5_K>;
    case Kind::Q6_K: return pack_tile<Kind::Q6_K>;
    case Kind::F32:
        return [](const uint8_t* p, size_t, int r, int c, uint8_t* t) { pack_plain<uint32_t>(p, r, c, t); };
    default:
        return [](const uint8_t* p, size_t, int r, int c, uint8_t* t) { pack_plain<uint16_t>(p, r, c, t); };
    }
}

template <Kind kind> size_t bytes_of(int columns) { return Format<kind>::tile_bytes(columns / kBlock); }

size_t tile_bytes(Kind kind, int columns) {
    switch (kind) {
    case Kind::Q4_0: return bytes_of<Kind::Q4_0>(columns);
    case Kind::Q4_1: return bytes_of<Kind::Q4_1>(columns);
    case Kind::Q5_0: return bytes_of<Kind::Q5_0>(columns);
    case Kind::Q5_1: return bytes_of<Kind::Q5_1>(columns);
    case Kind::Q8_0: return bytes_of<Kind::Q8_0>(columns);
    case Kind::Q4_K: return bytes_of<Kind::Q4_K>(columns);
    case Kind::Q5_K: return bytes_of<Kind::Q5_K>(columns);
    case Kind::Q6_K: return bytes_of<Kind::Q6_K>(columns);
    case Kind::F32: return size_t(columns) * kTile * 4;
    default: return size_t(columns) * kTile * 2;
    }
}

void expand_block(Kind kind, const Block& b, float* out) {
    const float d = wide(b.d);
    switch (kind) {
    case Kind::Q4_1:
    case Kind::Q5_1:
        for (int i = 0; i < 32; i++) out[i] = b.q[i] * d + wide(b.m);
        break;
    case Kind::Q4_K:
    case Kind::Q5_K:
        for (int i = 0; i < 256; i++) out[i] = d * b.s[i / 32] * b.q[i] - wide(b.m) * b.t[i / 32];
        break;
    case Kind::Q6_K:
        for (int i = 0; i < 256; i++) out[i] = d * int8_t(b.s[i / 16]) * (b.q[i] - 32);
        break;
    case Kind::Q8_0:
        for (int i = 0; i < 32; i++) out[i] = int8_t(b.q[i]) * d;
        break;
    default: {
        const int offset = kind == Kind::Q4_0 ? 8 : 16;
        for (int i = 0; i < 32; i++) out[i] = (b.q[i] - offset) * d;
    }
    }
}

void expand_plain(Kind kind, const uint8_t* row, int columns, float* out) {
    if (kind == Kind::F32) {
        std::memcpy(out, row, size_t(columns) * 4);
        return;
    }
    for (int i = 0; i < columns; i++) {
        const uint16_t bits = half_at(row + 2 * i);
        const uint32_t high = uint32_t(bits) << 16;
        if (kind == Kind::F16) out[i] = wide(bits);
        else std::memcpy(out + i, &high, 4);
    }
}

}  // namespace

size_t row_bytes(Kind kind, int columns) {
    const Stored form = stored(kind);
    return columns % form.values ? 0 : size_t(columns) / form.values * form.bytes;
}

void pack(Matrix& matrix, Kind kind, const uint8_t* data, int rows) {
    const int columns = matrix.columns;
    const size_t bytes = tile_bytes(kind, columns), stride = row_bytes(kind, columns);
    const int count = (rows + kTile - 1) / kTile;
    Part part{kind, rows, bytes, Buffer(bytes * count)};
    const PackTile pack_one = pack_tile_of(kind);
    parallel_for(count, [&](int i) {
        uint8_t* tile = part.tiles.data() + i * bytes;
        std::memset(tile, 0, bytes);
        const int first = i * kTile;
        pack_one(data + first * stride, stride, rows - first < kTile ? rows - first : kTile, columns, tile);
    });
    matrix.parts.push_back(std::move(part));
    matrix.rows += rows;
}

void expand(Kind kind, const uint8_t* row, int columns, float* out) {
    if (is_plain(kind)) return expand_plain(kind, row, columns, out);
    const Stored form = stored(kind);
    for (int i = 0; i < columns / form.values; i++) {
        Block block;
        form.take_apart(row + size_t(i) * form.bytes, block);
        expand_block(kind, block, out + size_t(i) * form.values);
    }
}

uint64_t read_stream(uintptr_t data, size_t bytes) {
    constexpr size_t piece = size_t(1) << 20;
    std::atomic<uint64_t> total{0};
    parallel_for(int((bytes + piece - 1) / piece), [&](int i) {
        const size_t end = bytes < (i + 1) * piece ? bytes : (i + 1) * piece;
        const uint64_t* words = reinterpret_cast<const uint64_t*>(data);
        uint64_t sum = 0;
        for (size_t at = i * piece / 8; at < end / 8; at++) sum += words[at];
        total += sum;
    });
    return total;
}

}  // namespace fuel
