// Causal attention of new tokens over caches, paged or contiguous, with the online softmax (arXiv:1805.02867).
//
// The keys of a session are taken in splits of kSplit positions, and these in chunks of kChunk, always from its
// first position; within a chunk head after head, so that memory is read in one stream. A row's result depends
// neither on the rows beside it nor on how the work is shared out.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace fuel::FUEL_ISA {

constexpr int kChunk = 32;   // positions whose keys and values stay in the first-level cache
constexpr int kSplit = 256;  // positions that a thread takes at a time
constexpr int kShared = 24;  // rows of a head that share the loads of a chunk, as near as whole tokens come to it
constexpr int kWiden = 6;    // rows from which on a chunk is widened once for all of them
constexpr int kSome = 8;     // positions whose values are added at a time
constexpr int AR = 3;        // rows that are computed at a time, with four keys or four vectors of values

inline int padded(int n) { return (n + W - 1) / W * W; }

// The running softmax of some rows: the largest score, the sum of weights, the weighted values [rows][width].
struct Softmax {
    float *most, *total, *values;
    int rows, width;

    static size_t floats(int rows, int width) { return size_t(rows) * (width + 2) + 2 * W; }
    static Softmax at(float* memory, int rows, int width) {
        return {memory, memory + padded(rows), memory + 2 * padded(rows), rows, width};
    }
    float* row(int r) const { return values + size_t(r) * width; }

    void clear() const {
        std::fill(most, most + rows, -INFINITY);
        std::fill(total, total + rows, 0.0f);
        std::fill(values, values + size_t(rows) * width, 0.0f);
    }
    void scale(int r, float factor) const {
        for (int i = 0; i < width; i += W) store(row(r) + i, mul(load(row(r) + i), set1(factor)));
    }
    void add(const Softmax& other) const {
        for (int r = 0; r < rows; r++) {
            if (other.total[r] == 0) continue;  // it saw nothing of this row
            const float top = std::max(most[r], other.most[r]);
            const float mine = total[r] == 0 ? 0 : std::exp(most[r] - top), theirs = std::exp(other.most[r] - top);
            total[r] = total[r] * mine + other.total[r] * theirs;
            most[r] = top;
            for (int i = 0; i < width; i += W) {
                const F more = mul(load(other.row(r) + i), set1(theirs));
                store(row(r) + i, fma(load(row(r) + i), set1(mine), more));
            }
        }
    }
};

// Scores of four keys for some rows of q. A lane sums every W-th product; then the lanes are summed.
template <int rows, class E>
void score4(const typename E::Stored* const* keys, const float* q, int width, float* scores) {
    F sums[rows][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sums[r][j] = zero();
    for (int i = 0; i < width; i += W) {
        F x[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) x[r] = load(q + size_t(r) * width + i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const F key = E::load(keys[j] + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][j] = fma(key, x[r], sums[r][j]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) store_sums(scores + r * kChunk, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

// Values of `count` positions by their weights, added to some vectors of some rows.
template <int rows, int vectors, class E>
void add_weighted(
    const typename E::Stored* const* values, int at, int count, const float* weights, float* to, int width
) {
    F sums[rows][vectors];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r][v] = load(to + size_t(r) * width + at + v * W);
    for (int k = 0; k < count; k++) {
        F weight[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) weight[r] = set1(weights[r * kChunk + k]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const F value = E::load(values[k] + at + v * W);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][v] = fma(value, weight[r], sums[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(to + size_t(r) * width + at + v * W, sums[r][v]);
}

template <int rows, class E>
void add_values(const typename E::Stored* const* values, int count, const float* weights, float* to, int width) {
    int at = 0;
    for (; at + 4 * W <= width; at += 4 * W) add_weighted<rows, 4, E>(values, at, count, weights, to, width);
    for (; at < width; at += W) add_weighted<rows, 1, E>(values, at, count, weights, to, width);
}

// body(first row, how many as a constant) over `count` rows in even groups of at most AR.
template <class Body> void by_groups(int count, const Body& body) {
    const int groups = (count + AR - 1) / AR;
    for (int group = 0, row = 0; group < groups; group++) {
        const int some = count * (group + 1) / groups - row;
        if (some == 3) body(row, std::integral_constant<int, 3>());
        else if (some == 2) body(row, std::integral_constant<int, 2>());
        else body(row, std::integral_constant<int, 1>());
        row += some;
    }
}

// Ask for some rows of a cache: for a few at a time, since all at once would wait for one another. Inline, or the
// compiler takes it for a function without effect and leaves it out.
template <class T> [[gnu::always_inline]] inline void ask(const T* const* rows, int count, int n) {
    for (int j = 0; j < count; j++)
        for (int i = 0; i < n; i += 64 / int(sizeof(T))) __builtin_prefetch(rows[j] + i);
}

// Where some positions of a session lie.
template <class E> struct Cache {
    using T = typename E::Stored;
    const Attend& a;
    int session;

    size_t offset(int position) const {
        if (!a.table) return session * a.block_stride + position * a.slot_stride;
        const size_t block = a.table[size_t(session) * a.width + position / a.block_size];
        return block * a.block_stride + position % a.block_size * a.slot_stride;
    }
    const T* key(size_t offset, int head) const { return static_cast<const T*>(a.k) + offset + head * a.head_stride; }
    const T* value(size_t offset, int head) const { return static_cast<const T*>(a.v) + offset + head * a.head_stride; }
};

// Some new tokens of one session.
struct Piece {
    int session, first, queries, split, splits;  // first: their first row in q
    int start;                                   // and its position
};

template <class E> struct Attention {
    using T = typename E::Stored;
    const Attend& a;
    const int group = a.q_heads / a.kv_heads;
    const int width = padded(a.head_dim);
    const int queries = std::max(1, kShared / group);  // new tokens of a piece
    const bool is_whole = width == a.head_dim;

    int rows(const Piece& p) const { return p.queries * group; }

    // Queries, scaled: [Hkv][rows][width].
    float* take_queries(const Piece& p, Scratch& scratch) const {
        const int n = a.head_dim;
        float* q = scratch.take<float>(size_t(a.kv_heads) * rows(p) * width);
        for (int t = 0; t < p.queries; t++)
            for (int h = 0; h < a.q_heads; h++) {
                const float* from = a.q + (size_t(p.first + t) * a.q_heads + h) * n;
                float* to = q + (size_t(h / group) * rows(p) + t * group + h % group) * width;
                for (int i = 0; i < n; i++) to[i] = from[i] * a.scale;
                std::fill(to + n, to + width, 0.0f);
            }
        return q;
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

    // One head over a chunk of `count` positions from `first` on: rows of q, and their rows in the state from `base` on.
    // What comes next is asked for on the way.
    template <class S>
    void add_chunk(
        const Piece& p, int first, int count, const typename S::Stored* const* keys,
        const typename S::Stored* const* values, const T* const* next_keys, const T* const* next_values,
        const float* q, int base, float* weights, const Softmax& state
    ) const {
        const auto seen = [&](int t) { return std::min(count, p.start + t + 1 - first); };
        const int from = std::max(0, first - p.start);  // tokens before it see nothing of this chunk
        const int n = rows(p) - from * group;
        q += size_t(from) * group * width, base += from * group;
        by_groups(n, [&](int row, auto some) {
            for (int j = 0; j < count; j += 4) {
                if (row == 0) ask(next_keys + j, 4, a.head_dim);
                score4<some(), S>(keys + j, q + size_t(row) * width, width, weights + row * kChunk + j);
            }
        });
        for (int row = 0; row < n; row++) weigh(weights + row * kChunk, seen(from + row / group), state, base + row);
        const auto add = [&](int row, int end, int these) {
            by_groups(end - row, [&](int at, auto some) {
                for (int k = 0; k < these; k += kSome) {
                    if (row + at == 0) ask(next_values + k, kSome, a.head_dim);
                    add_values<some(), S>(
                        values + k, std::min(kSome, these - k), weights + (row + at) * kChunk + k,
                        state.row(base + row + at), width
                    );
                }
            });
        };
        // Tokens that see less than the whole chunk go one by one: a later one's fault is not theirs.
        int t = from;
        for (; t < p.queries && seen(t) < count; t++) add((t - from) * group, (t + 1 - from) * group, seen(t));
        add((t - from) * group, n, count);
    }

    // Positions of a split, into a state of their own.
    void add_split(const Piece& p, int split, const float* q, Scratch& scratch, const Softmax& state) const {
        const Scratch::Scope scope(scratch);
        const Cache<E> cache{a, p.session};
        const int n = rows(p), end = std::min((split + 1) * kSplit, p.start + p.queries);
        const bool widen = !is_whole || n > kWiden;
        float* weights = scratch.take<float>(size_t(n) * kChunk);
        float* wide = scratch.take<float>(widen ? size_t(2) * kChunk * width : 0);
        size_t lines[2 * kChunk], *here = lines, *next = lines + kChunk;
        const auto locate = [&](int first, size_t* offsets) {
            for (int j = 0; j < kChunk; j++) offsets[j] = cache.offset(std::min(first + j, end - 1));
        };
        locate(split * kSplit, here);
        state.clear();
        for (int first = split * kSplit; first < end; first += kChunk, std::swap(here, next)) {
            const int count = std::min(kChunk, end - first);
            locate(first + kChunk, next);
            for (int h = 0; h < a.kv_heads; h++) {
                const int next_head = (h + 1) % a.kv_heads;
                const size_t* then = next_head ? here : next;
                const T *keys[kChunk], *values[kChunk], *next_keys[kChunk], *next_values[kChunk];
                for (int j = 0; j < kChunk; j++) {
                    keys[j] = cache.key(here[j], h), values[j] = cache.value(here[j], h);
                    next_keys[j] = cache.key(then[j], next_head), next_values[j] = cache.value(then[j], next_head);
                }
                const float* rows_of_head = q + size_t(h) * n * width;
                if (!widen) {
                    add_chunk<E>(p, first, count, keys, values, next_keys, next_values, rows_of_head, h * n, weights, state);
                    continue;
                }
                const float *wide_keys[kChunk], *wide_values[kChunk];
                for (int j = 0; j < kChunk; j++) {
                    wide_keys[j] = wide + size_t(std::min(j, count - 1)) * width, wide_values[j] = wide_keys[j] + size_t(kChunk) * width;
                    if (j >= count) continue;
                    widen_row(keys[j], wide + size_t(j) * width), widen_row(values[j], wide + size_t(kChunk + j) * width);
                }
                add_chunk<F32>(
                    p, first, count, wide_keys, wide_values, next_keys, next_values, rows_of_head, h * n, weights, state
                );
            }
        }
    }

    // A row of a cache as floats, padded with zeros.
    void widen_row(const T* from, float* to) const {
        int i = 0;
        for (; i + W <= a.head_dim; i += W) store(to + i, E::load(from + i));
        for (; i < width; i++) to[i] = i < a.head_dim ? E::wide(from[i]) : 0;
    }

    void put(const Piece& p, const Softmax& state) const {
        const int n = rows(p);
        for (int t = 0; t < p.queries; t++)
            for (int h = 0; h < a.q_heads; h++) {
                const int row = h / group * n + t * group + h % group;
                const float inverse = 1 / state.total[row], *from = state.row(row);
                float* to = a.out + (size_t(p.first + t) * a.q_heads + h) * a.head_dim;
                for (int i = 0; i < a.head_dim; i++) to[i] = from[i] * inverse;
            }
    }

    Softmax state_of(const Piece& p, Scratch& scratch) const {
        const int all = a.kv_heads * rows(p);
        return Softmax::at(scratch.take<float>(Softmax::floats(all, width)), all, width);
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

    int pieces_of(int session) const { return (a.counts[session] + queries - 1) / queries; }

    // The pieces of all sessions, each once or once for each of its splits.
    int cut(bool by_splits, Piece* pieces) const {
        int count = 0, row = 0;
        for (int s = 0; s < a.sessions; row += a.counts[s++]) {
            const int start = a.lengths[s] - a.counts[s];
            for (int t = 0; t < a.counts[s]; t += queries) {
                const int some = std::min(queries, a.counts[s] - t);
                const int splits = (start + t + some + kSplit - 1) / kSplit;
                for (int split = 0; split < (by_splits ? splits : 1); split++)
                    pieces[count++] = {s, row + t, some, split, splits, start + t};
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
