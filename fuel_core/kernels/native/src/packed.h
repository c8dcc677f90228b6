// How a matrix lies in memory for the products: tiles of 16 rows, each streamed from front to back.
//
// A quantized tile is a run of units (a GGML block of each of its 16 rows): the unit's header, where the format
// has super-blocks, then for every 32 columns the quants and the scales.
//
//   quants   unsigned, so that a product of unsigned by signed bytes takes them; whole bytes are signed. Line g of 64 bytes has the
//            columns 4 g to 4 g + 3 of the 16 rows, one row after another. Nibbles: line j holds g = j in
//            its lower and g = j + 4 in its upper halves. Higher bits follow: a line of fifth bits, bit g for
//            line g; or two lines of upper pairs, line p with g = 4 p + i at bits 2 i.
//   scales   of the 16 rows side by side. A value is d q + m.
//
// A plain tile is [columns][16] elements of the stored type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fuel {

constexpr int kTile = 16;   // rows
constexpr int kBlock = 32;  // columns

enum class Quants { U4, U5, U6, U8 };
enum class Scales {
    Half,     // d in half precision; m = -offset d
    HalfMin,  // d and m in half precision
    Super,    // header: d and dmin in half precision; per block a byte each: d = D s, m = -Dmin t
    Super16,  // header: d in half precision; per block two signed bytes, one for each 16 columns; m = -offset d
};

constexpr int quant_bytes(Quants q) {
    return q == Quants::U4 ? 256 : q == Quants::U5 ? 320 : q == Quants::U6 ? 384 : 512;
}
constexpr int scale_bytes(Scales s) { return s == Scales::HalfMin ? 64 : 32; }
constexpr int header_bytes(Scales s) { return s == Scales::Super ? 64 : s == Scales::Super16 ? 32 : 0; }
constexpr bool has_units(Scales s) { return header_bytes(s) > 0; }

// The kinds of matrix that there are kernels for.
enum class Kind { F32, Bf16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

constexpr bool is_plain(Kind kind) { return kind <= Kind::F16; }

// One format of quantized rows.
template <Kind> struct Format;
template <Quants q, Scales s, int off> struct FormatOf {
    static constexpr Quants quants = q;
    static constexpr Scales scales = s;
    static constexpr int offset = off;
    static constexpr int block_bytes = quant_bytes(q) + scale_bytes(s);
    // Where block b of a tile starts, and the header of its unit.
    static constexpr size_t block_at(size_t b) {
        return b * block_bytes + (has_units(s) ? (b / 8 + 1) * header_bytes(s) : 0);
    }
    static constexpr size_t header_at(size_t b) { return b / 8 * (8 * block_bytes + header_bytes(s)); }
    static constexpr size_t tile_bytes(size_t blocks) {
        return blocks * block_bytes + (has_units(s) ? blocks / 8 * header_bytes(s) : 0);
    }
};
template <> struct Format<Kind::Q4_0> : FormatOf<Quants::U4, Scales::Half, 8> {};
template <> struct Format<Kind::Q4_1> : FormatOf<Quants::U4, Scales::HalfMin, 0> {};
template <> struct Format<Kind::Q5_0> : FormatOf<Quants::U5, Scales::Half, 16> {};
template <> struct Format<Kind::Q5_1> : FormatOf<Quants::U5, Scales::HalfMin, 0> {};
template <> struct Format<Kind::Q8_0> : FormatOf<Quants::U8, Scales::Half, 128> {};
template <> struct Format<Kind::Q4_K> : FormatOf<Quants::U4, Scales::Super, 0> {};
template <> struct Format<Kind::Q5_K> : FormatOf<Quants::U5, Scales::Super, 0> {};
template <> struct Format<Kind::Q6_K> : FormatOf<Quants::U6, Scales::Super16, 32> {};

// Bytes aligned to a cache line, in huge pages where the system has them.
class Buffer {
public:
    explicit Buffer(size_t bytes);
    uint8_t* data() { return data_.get(); }
    const uint8_t* data() const { return data_.get(); }
    size_t size() const { return size_; }

private:
    struct Free {
        void operator()(uint8_t* p) const;
    };
    std::unique_ptr<uint8_t[], Free> data_;
    size_t size_;
};

// Rows of one kind, in tiles; the last is padded with zeros.
struct Part {
    Kind kind;
    int rows;
    size_t tile_bytes;
    Buffer tiles;

    int count() const { return (rows + kTile - 1) / kTile; }
    const uint8_t* tile(int i) const { return tiles.data() + i * tile_bytes; }
};

// Maps of one input whose outputs stand side by side.
struct Matrix {
    explicit Matrix(int width) : columns(width) {}
    Matrix(const Matrix&) = delete;

    int columns;
    int rows = 0;
    std::vector<Part> parts{};
    std::vector<float> bias{};  // [rows], or empty

    size_t bytes() const;
    int tiles() const;
};

// Bytes of a row as it is stored in a file, or 0 where the columns are no whole number of blocks.
size_t row_bytes(Kind kind, int columns);

// Append rows [rows, columns], stored one after another, to a matrix.
void pack(Matrix& matrix, Kind kind, const uint8_t* data, int rows);

// One row as float32.
void expand(Kind kind, const uint8_t* row, int columns, float* out);

// Read memory once, on every thread, as fast as it comes.
uint64_t read_stream(uintptr_t data, size_t bytes);

}  // namespace fuel
