// One token of each row of logits: the largest, or one drawn by temperature, top-k, top-p and min-p.
//
// Probabilities are whole numbers, round(p / p_max · top_weight), whose sums are exact in any order: what is kept and
// what is drawn depends neither on how a row is walked nor on the instruction set, but for the rounding of e^x.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace fuel::FUEL_ISA {

// The first of the largest; a NaN is larger than all.
inline int64_t argmax_row(const float* x, int n) {
    F most = set1(-INFINITY), fault = zero();
    int i = 0;
    for (; i + W <= n; i += W) {
        const F v = load(x + i);
        most = max(most, v);
        fault = add(fault, sub(v, v));  // NaN of a NaN and of an infinity
    }
    float top = largest(most);
    bool is_sound = sum(fault) == 0;
    for (; i < n; i++) top = x[i] > top ? x[i] : top, is_sound &= !std::isnan(x[i]);
    if (!is_sound)
        for (int j = 0; j < n; j++)
            if (std::isnan(x[j])) return j;
    for (int j = 0; j < n; j++)
        if (x[j] == top) return j;
    return 0;
}

inline void largest_of_rows(const float* x, int rows, int n, int64_t* ids, float* values) {
    parallel_for(rows, [=](int row) {
        const float* from = x + size_t(row) * n;
        ids[row] = argmax_row(from, n);
        values[row] = from[ids[row]];
    });
}

// Doubles of one register: the compiler takes what is wider apart.
#if defined(__AVX2__)
constexpr int kDoubles = W / 2;
#else
constexpr int kDoubles = 2;
#endif
typedef double D __attribute__((vector_size(8 * kDoubles)));
typedef int64_t DBits __attribute__((vector_size(8 * kDoubles)));

[[gnu::always_inline]] inline void load_doubles(const double* from, D& to) { std::memcpy(&to, from, sizeof to); }
[[gnu::always_inline]] inline void load_doubles(const float* from, D& to) {
    typedef float Floats __attribute__((vector_size(4 * kDoubles)));
    Floats some;
    std::memcpy(&some, from, sizeof some);
    to = __builtin_convertvector(some, D);
}
inline double sum_of(const D& x) {
    double sum = 0;
    for (int j = 0; j < kDoubles; j++) sum += x[j];
    return sum;
}

// body(i, some of x from i on) over n values, the last padded with -infinity.
template <class T, class Body> [[gnu::always_inline]] inline void by_doubles(const T* x, int n, const Body& body) {
    D value;
    int i = 0;
    for (; i + kDoubles <= n; i += kDoubles) {
        load_doubles(x + i, value);
        body(i, value);
    }
    if (i == n) return;
    double rest[kDoubles];
    for (int j = 0; j < kDoubles; j++) rest[j] = i + j < n ? double(x[i + j]) : -INFINITY;
    load_doubles(rest, value);
    body(i, value);
}

inline int whole(int n) { return (n + kDoubles - 1) / kDoubles * kDoubles; }

// e^x of x ≤ 0, within 2 units in the last place; below -700 it is tiny. Cody and Waite's reduction, and Taylor's
// polynomial of degree 13.
[[gnu::always_inline]] inline void exp_all(D& x) {
    constexpr double shift = 0x1.8p52;  // added, it leaves the nearest integer in the lowest bits
    const D low = D{} - 700.0;
    x = x < low ? low : x;
    const D shifted = x * 0x1.71547652b82fep0 + shift;
    const D n = shifted - shift, r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
    D p = D{} + 1.0 / 6227020800.0;
    constexpr double terms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
    for (double term : terms) p = p * r + term;
    x = (D)((DBits)p + ((DBits)shifted << 52));
}

template <class T> double largest_of(const T* x, int n) {
    D most = D{} - INFINITY;
    by_doubles(x, n, [&](int, D& value) __attribute__((always_inline)) { most = value > most ? value : most; });
    double top = most[0];
    for (int j = 1; j < kDoubles; j++) top = std::max(top, double(most[j]));
    return top;
}

// The values that are at least the k-th largest, and their ids, in order; returns their number. k < n, and no value is a NaN.
template <class T> int take_largest(const T* x, int n, int k, T* values, int32_t* ids) {
    constexpr int piece = 64;
    const int pieces = (n + piece - 1) / piece;
    const auto take = [&](T bound) {
        int count = 0;
        for (int i = 0; i < n; i++)
            if (x[i] >= bound) values[count] = x[i], ids[count++] = i;
        return count;
    };
    const auto kth_of = [&](int count) {
        std::nth_element(values, values + k - 1, values + count, std::greater<T>());
        return values[k - 1];
    };
    T bound = T(-INFINITY);
    if (k <= pieces) {  // at least k values are as large as the k-th largest of the pieces' largest
        for (int i = 0; i < pieces; i++) values[i] = T(largest_of(x + i * piece, std::min(piece, n - i * piece)));
        bound = kth_of(pieces);
    }
    return take(kth_of(take(bound)));
}

// The weight at which the sum of the largest reaches `mass`: buckets of near weights are summed from the top, and only the one
// that passes it is sorted.
inline double mass_floor(const double* weights, int n, double mass, Scratch& scratch) {
    constexpr int digits = 5, buckets = 64 << digits;  // of a bucket: the exponent, at most 53, and bits of the mantissa
    const auto bucket_of = [](double weight) {
        int64_t bits;
        std::memcpy(&bits, &weight, 8);
        return int(bits >> (52 - digits)) - (1023 << digits);
    };
    const Scratch::Scope scope(scratch);
    double* sums = scratch.take<double>(buckets);
    std::fill(sums, sums + buckets, 0.0);
    for (int i = 0; i < n; i++)
        if (weights[i] > 0) sums[bucket_of(weights[i])] += weights[i];
    double above = 0;
    int bucket = buckets - 1;
    for (; bucket > 0 && above + sums[bucket] < mass; bucket--) above += sums[bucket];
    double* near = scratch.take<double>(n);
    int count = 0;
    for (int i = 0; i < n; i++)
        if (weights[i] > 0 && bucket_of(weights[i]) == bucket) near[count++] = weights[i];
    std::sort(near, near + count, std::greater<double>());
    for (int i = 0; i < count; i++)
        if ((above += near[i]) >= mass) return near[i];
    return count ? near[count - 1] : 0;
}

// Weights of n values, padded with zeros to whole registers.
template <class T> void weigh_all(const T* x, int n, double top, double temperature, double top_weight, double* out) {
    const D most = D{} + top;
    by_doubles(x, n, [&](int i, D& value) __attribute__((always_inline)) {
        value = (value - most) / temperature;
        exp_all(value);
        constexpr double shift = 0x1p52;  // added to less than 2^52, it leaves the nearest integer, of a tie the even one
        value = value * top_weight + shift - shift;
        std::memcpy(out + i, &value, sizeof value);
    });
}

// The first whose cumulative sum of weights, those below `floor` left out, passes `uniform` of all.
inline int64_t walk(double* weights, int n, double floor, double uniform) {
    constexpr int piece = 256;
    const D least = D{} + floor;
    const int end = whole(n);
    double total = 0;
    const auto sum_from = [&](int first, bool cut) {
        D sum{}, value;
        for (int i = first; i < std::min(end, first + piece); i += kDoubles) {
            load_doubles(weights + i, value);
            if (cut) {
                value = (D)((DBits)value & (value >= least));
                std::memcpy(weights + i, &value, sizeof value);
            }
            sum += value;
        }
        return sum_of(sum);
    };
    for (int first = 0; first < end; first += piece) total += sum_from(first, true);
    const double target = uniform * total;
    double sum = 0, more;
    int first = 0;
    for (; first + piece < end && sum + (more = sum_from(first, false)) <= target; first += piece) sum += more;
    for (int i = first; i < n; i++)
        if ((sum += weights[i]) > target) return i;
    return n - 1;
}

template <class T> int64_t draw_row(const Draw& a, int row) {
    const T* x = static_cast<const T*>(a.logits) + size_t(row) * a.vocab;
    DBits fault{};
    by_doubles(x, a.vocab, [&](int, D& value) __attribute__((always_inline)) { fault |= value != value; });
    const double top = largest_of(x, a.vocab);
    for (int j = 0; j < kDoubles; j++)
        if (fault[j]) return 0;
    if (std::isinf(top)) return 0;
    Scratch& scratch = Scratch::of_thread();
    const Scratch::Scope scope(scratch);
    const int k = a.top_k[row];
    int n = a.vocab;
    const int32_t* ids = nullptr;
    if (k > 0 && k < n) {
        T* values = scratch.take<T>(n);
        int32_t* taken = scratch.take<int32_t>(n);
        n = take_largest(x, n, k, values, taken);
        x = values, ids = taken;
    }
    double* weights = scratch.take<double>(whole(n));
    weigh_all(x, n, top, a.temperature[row], a.top_weight, weights);
    double least = a.min_p[row] * a.top_weight;
    if (a.top_p[row] < 1) {
        D total{};
        by_doubles(weights, whole(n), [&](int, D& value) __attribute__((always_inline)) { total += value; });
        least = std::max(least, mass_floor(weights, n, sum_of(total) * a.top_p[row], scratch));
    }
    const int64_t at = walk(weights, n, least, a.uniforms[row]);
    return ids ? ids[at] : at;
}

inline void draw(const Draw& a, int64_t* out) {
    parallel_for(a.rows, [&](int row) { out[row] = a.is_double ? draw_row<double>(a, row) : draw_row<float>(a, row); });
}

}  // namespace fuel::FUEL_ISA
