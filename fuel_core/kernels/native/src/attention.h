// Causal attention of new tokens over caches, paged or contiguous, with the online softmax (arXiv:1805.02867).
//
// The keys of a session are taken in splits of kSplit positions, and these in chunks of kChunk, always from its
// first position; a chunk's keys are turned into tiles, so that scores and values are products as in products.h.
// A row's result depends neither on the rows beside it nor on how the work is shared out.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "products.h"
#include "scratch.h"
#include "simd.h"

namespace fuel::FUEL_ISA {

constexpr int kChunk = 2 * kTile;  // positions whose keys and values stay in the first-level cache
constexpr int kSplit = 512;        // positions that a thread takes at a time
constexpr int kShared = 24;        // rows that share the loads of a chunk, as near as whole tokens come to it

// The running softmax of some rows: the largest score, the sum of weights, the weighted values [D / 16][rows][16].
struct Softmax {
    float *most, *total, *values;
    int rows, tiles;

    static int padded(int rows) { return (rows + kTile - 1) / kTile * kTile; }
    static size_t floats(int rows, int tiles) { return size_t(2) * padded(rows) + size_t(rows) * tiles * kTile; }
    static Softmax at(float* memory, int rows, int tiles) {
        return {memory, memory + padded(rows), memory + 2 * padded(rows), rows, tiles};
    }
    void clear() const {
        std::fill(most, most + padded(rows), -INFINITY);
        std::fill(total, values + size_t(rows) * tiles * kTile, 0.0f);
    }
    float* tile(int i, int row) const { return values + (size_t(i) * rows + row) * kTile; }

    void scale(int row, float factor) const {
        for (int i = 0; i < tiles; i++)
            for (int v = 0; v < kTile; v += W) store(tile(i, row) + v, mul(load(tile(i, row) + v), set1(factor)));
    }
    void add(const Softmax& other) const {
        for (int r = 0; r < rows; r++) {
            if (other.total[r] == 0) continue;  // it saw nothing of this row
            const float top = std::max(most[r], other.most[r]);
            const float mine = total[r] == 0 ? 0 : std::exp(most[r] - top), theirs = std::exp(other.most[r] - top);
            total[r] = total[r] * mine + other.total[r] * theirs;
            most[r] = top;
            for (int i = 0; i < tiles; i++)
                for (int v = 0; v < kTile; v += W) {
                    const F more = mul(load(other.tile(i, r) + v), set1(theirs));
                    store(tile(i, r) + v, fma(load(tile(i, r) + v), set1(mine), more));
                }
        }
    }
};

// 8 rows of 8 elements become 8 columns of floats, `stride` apart.
template <class E> void turn8(const typename E::Stored* const* from, int at, float* to, int stride) {
#if defined(__AVX2__)
    __m256 x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = E::load8(from[i] + at);
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
            x[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
#else
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) to[i * stride + j] = E::wide(from[j][at + i]);
#endif
}

// Values of a chunk's positions: 16 columns of each.
template <class E> struct ValueTile {
    const typename E::Stored* const* rows;
    int column;

    template <class Take> [[gnu::always_inline]] void columns(int first, int count, const Take& take) const {
        for (int k = 0; k < count; k++) {
            F values[NV];
            for (int v = 0; v < NV; v++) values[v] = E::load(rows[first + k] + column + v * W);
            take(k, values);
        }
    }
};

// Some positions of one KV head of a session: keys in two tiles [D][16], values where they lie.
template <class T> struct Chunk {
    float* keys;
    T* stage;  // [kChunk][padded], for values that are not whole tiles: padded with zeros
    const T* values[kChunk];
    int count;
};

template <class E> struct Cache {
    using T = typename E::Stored;
    const Attend& a;
    int session, head, padded;

    size_t offset(int position) const {
        const size_t h = head * a.head_stride;
        if (!a.table) return session * a.block_stride + position * a.slot_stride + h;
        const size_t block = a.table[size_t(session) * a.width + position / a.block_size];
        return block * a.block_stride + position % a.block_size * a.slot_stride + h;
    }
    void take(int first, int count, Chunk<T>& chunk) const {
        chunk.count = count;
        const T *k = static_cast<const T*>(a.k), *v = static_cast<const T*>(a.v);
        const T* keys[kChunk];
        for (int j = 0; j < count; j++) {
            const size_t at = offset(first + j);
            keys[j] = k + at, chunk.values[j] = v + at;
            if (padded == a.head_dim) continue;
            T* to = chunk.stage + size_t(j) * padded;
            std::copy(v + at, v + at + a.head_dim, to);
            std::fill(to + a.head_dim, to + padded, T(0));
            chunk.values[j] = to;
        }
        for (int j = count; j < kChunk; j++) keys[j] = keys[count - 1];  // its scores are not looked at
        turn(keys, (count + 7) / 8, chunk.keys);
    }
    // Keys in rows to tiles [D][16]; `eights` groups of 8 positions.
    void turn(const T* const (&keys)[kChunk], int eights, float* tiles) const {
        const int n = a.head_dim;
        for (int e = 0; e < eights; e++) {
            const T* const* rows = keys + 8 * e;
            float* to = tiles + size_t(e / 2) * n * kTile + e % 2 * 8;
            int i = 0;
            for (; i + 8 <= n; i += 8) turn8<E>(rows, i, to + size_t(i) * kTile, kTile);
            for (; i < n; i++)
                for (int j = 0; j < 8; j++) to[size_t(i) * kTile + j] = E::wide(rows[j][i]);
        }
    }
    // Ask for what the next chunk reads, which lies scattered.
    void prefetch(int first, int count) const {
        const int bytes = a.head_dim * int(sizeof(T));
        for (int j = 0; j < count; j++) {
            const size_t at = offset(first + j);
            for (int i = 0; i < bytes; i += 64) {
                __builtin_prefetch(reinterpret_cast<const char*>(static_cast<const T*>(a.k) + at) + i);
                __builtin_prefetch(reinterpret_cast<const char*>(static_cast<const T*>(a.v) + at) + i);
            }
        }
    }
};

// Some new tokens of one session and one KV head.
struct Piece {
    int session, head, first, queries, split, splits;  // first: their first row in q
    int start;                                         // and its position
};

template <class E> struct Attention {
    using T = typename E::Stored;
    const Attend& a;
    const int group = a.q_heads / a.kv_heads;
    const int tiles = (a.head_dim + kTile - 1) / kTile;
    const int queries = std::max(1, kShared / group);  // new tokens of a piece

    int rows(const Piece& p) const { return p.queries * group; }

    // Queries, scaled: [rows][D].
    float* take_queries(const Piece& p, Scratch& scratch) const {
        const int n = a.head_dim;
        float* q = scratch.take<float>(size_t(rows(p)) * n);
        for (int t = 0; t < p.queries; t++)
            for (int g = 0; g < group; g++) {
                const float* from = a.q + (size_t(p.first + t) * a.q_heads + p.head * group + g) * n;
                float* to = q + size_t(t * group + g) * n;
                for (int i = 0; i < n; i++) to[i] = from[i] * a.scale;
            }
        return q;
    }

    // Scores [rows][kChunk] of a chunk for the rows from `first` on.
    void score(const Chunk<T>& chunk, const float* q, int first, int end, float* weights) const {
        const int n = a.head_dim;
        alignas(64) float sums[PR * kTile];
        for (int tile = 0; tile * kTile < chunk.count; tile++) {
            const PlainTile<F32> keys(reinterpret_cast<const uint8_t*>(chunk.keys + size_t(tile) * n * kTile));
            for (int row = first; row < end; row += PR) {
                const int some = std::min(PR, end - row);
                std::fill(sums, sums + some * kTile, 0.0f);
                add_some<PR>(some, keys, 0, n, q + size_t(row) * n, n, sums);
                for (int r = 0; r < some; r++)
                    std::copy(sums + r * kTile, sums + (r + 1) * kTile, weights + size_t(row + r) * kChunk + tile * kTile);
            }
        }
    }

    // The weights of a row's first `count` positions, and what was there scaled to them.
    void weigh(float* weights, int count, const Softmax& state, int row) const {
        std::fill(weights + count, weights + kChunk, -INFINITY);
        F most = set1(state.most[row]);
        for (int j = 0; j < kChunk; j += W) most = max(most, load(weights + j));
        const float top = largest(most);
        for (int j = 0; j < kChunk; j += W) store(weights + j, exp(sub(load(weights + j), set1(top))));
        std::fill(weights + count, weights + kChunk, 0.0f);
        F total = zero();
        for (int j = 0; j < kChunk; j += W) total = add(total, load(weights + j));
        const float keep = state.total[row] == 0 ? 0 : std::exp(state.most[row] - top);
        state.total[row] = state.total[row] * keep + sum(total);
        state.most[row] = top;
        if (keep != 1) state.scale(row, keep);
    }

    // Weighted values of `count` positions, added to the rows from `first` on.
    void add_values(const Chunk<T>& chunk, int count, const float* weights, int first, int end, const Softmax& state) const {
        for (int tile = 0; tile < tiles; tile++) {
            const ValueTile<E> values{chunk.values, tile * kTile};
            for (int row = first; row < end; row += PR)
                add_some<PR>(
                    std::min(PR, end - row), values, 0, count, weights + size_t(row) * kChunk, kChunk, state.tile(tile, row)
                );
        }
    }

    // Positions of a split, into a state of their own.
    void add_split(const Piece& p, int split, const float* q, Scratch& scratch, const Softmax& state) const {
        const Scratch::Scope scope(scratch);
        const int padded = tiles * kTile, n = rows(p);
        const Cache<E> cache{a, p.session, p.head, padded};
        float* weights = scratch.take<float>(size_t(n) * kChunk);
        Chunk<T> chunk;
        chunk.keys = scratch.take<float>(size_t(kChunk) * a.head_dim);
        chunk.stage = scratch.take<T>(size_t(kChunk) * padded);
        const int end = std::min((split + 1) * kSplit, p.start + p.queries);
        state.clear();
        for (int first = split * kSplit; first < end; first += kChunk) {
            cache.take(first, std::min(kChunk, end - first), chunk);
            if (first + kChunk < end) cache.prefetch(first + kChunk, std::min(kChunk, end - first - kChunk));
            const auto seen = [&](int t) { return std::min(chunk.count, p.start + t + 1 - first); };
            const int from = std::max(0, first - p.start);  // tokens before it see nothing of this chunk
            score(chunk, q, from * group, n, weights);
            for (int row = from * group; row < n; row++)
                weigh(weights + size_t(row) * kChunk, seen(row / group), state, row);
            // Tokens that see less than the whole chunk go one by one: a later one's fault is not theirs.
            int t = from;
            for (; t < p.queries && seen(t) < chunk.count; t++)
                add_values(chunk, seen(t), weights, t * group, (t + 1) * group, state);
            add_values(chunk, chunk.count, weights, t * group, n, state);
        }
    }

    void put(const Piece& p, const Softmax& state) const {
        for (int row = 0; row < rows(p); row++) {
            const size_t at = size_t(p.first + row / group) * a.q_heads + p.head * group + row % group;
            const float inverse = 1 / state.total[row];
            for (int i = 0; i < a.head_dim; i++)
                a.out[at * a.head_dim + i] = state.tile(i / kTile, row)[i % kTile] * inverse;
        }
    }

    Softmax state_of(const Piece& p, Scratch& scratch) const {
        return Softmax::at(scratch.take<float>(Softmax::floats(rows(p), tiles)), rows(p), tiles);
    }

    // All splits of some tokens, one after another.
    void whole(const Piece& p) const {
        Scratch& scratch = Scratch::of_thread();
        const Scratch::Scope scope(scratch);
        const float* q = take_queries(p, scratch);
        const Softmax total = state_of(p, scratch), part = state_of(p, scratch);
        total.clear();
        for (int split = 0; split < p.splits; split++) {
            add_split(p, split, q, scratch, part);
            total.add(part);
        }
        put(p, total);
    }

    void one_split(const Piece& p, const Softmax& state) const {
        Scratch& scratch = Scratch::of_thread();
        const Scratch::Scope scope(scratch);
        add_split(p, p.split, take_queries(p, scratch), scratch, state);
    }

    int pieces_of(int session) const { return (a.counts[session] + queries - 1) / queries * a.kv_heads; }

    // The pieces of all sessions, each once or once for each of its splits.
    int cut(bool by_splits, Piece* pieces) const {
        int count = 0, row = 0;
        for (int s = 0; s < a.sessions; row += a.counts[s++]) {
            const int start = a.lengths[s] - a.counts[s];
            for (int t = 0; t < a.counts[s]; t += queries) {
                const int some = std::min(queries, a.counts[s] - t);
                const int splits = (start + t + some + kSplit - 1) / kSplit;
                for (int h = 0; h < a.kv_heads; h++)
                    for (int split = 0; split < (by_splits ? splits : 1); split++)
                        pieces[count++] = {s, h, row + t, some, split, splits, start + t};
            }
        }
        return count;
    }
};

template <class E> void attention(const Attend& a) {
    const Attention<E> kernel{a};
    Scratch& scratch = Scratch::of_thread();
    const Scratch::Scope scope(scratch);
    int plain = 0, most = 0, longest = 0;
    for (int s = 0; s < a.sessions; s++) {
        plain += kernel.pieces_of(s);
        most += kernel.pieces_of(s) * ((a.lengths[s] + kSplit - 1) / kSplit);
        longest = std::max(longest, a.lengths[s]);
    }
    // Few tokens over many keys are shared out by splits, the rest by tokens.
    const bool by_splits = longest > kSplit && plain < 4 * threads();
    Piece* pieces = scratch.take<Piece>(by_splits ? most : plain);
    const int count = kernel.cut(by_splits, pieces);
    if (!by_splits) {
        // The longest first, so that the last to end is short.
        std::sort(pieces, pieces + count, [](const Piece& x, const Piece& y) {
            return x.start + x.queries > y.start + y.queries;
        });
        parallel_for(count, [&](int i) { kernel.whole(pieces[i]); });
        return;
    }
    Softmax* states = scratch.take<Softmax>(count);
    for (int i = 0; i < count; i++) states[i] = kernel.state_of(pieces[i], scratch);
    parallel_for(count, [&](int i) { kernel.one_split(pieces[i], states[i]); });
    for (int i = 0; i < count; i += pieces[i].splits) {
        const Softmax total = kernel.state_of(pieces[i], scratch);
        total.clear();
        for (int split = 0; split < pieces[i].splits; split++) total.add(states[i + split]);
        kernel.put(pieces[i], total);
    }
}

}  // namespace fuel::FUEL_ISA
