// Norm, rotation, activation: what surrounds the products, row by row.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace fuel::FUEL_ISA {

// Rows are shared out only where that is worth waking a thread for.
template <class Body> void each_row(int rows, size_t values_per_row, const Body& body) {
    constexpr size_t piece = 16384;
    const int some = int(std::max<size_t>(1, piece / std::max<size_t>(1, values_per_row)));
    parallel_for((rows + some - 1) / some, [&](int i) {
        for (int row = i * some; row < std::min(rows, (i + 1) * some); row++) body(row);
    });
}

inline void norm_row(const float* x, const float* gain, float eps, int n, float* out) {
    F squares = zero();
    float rest = 0;
    int i = 0;
    for (; i + W <= n; i += W) squares = fma(load(x + i), load(x + i), squares);
    for (int j = i; j < n; j++) rest += x[j] * x[j];
    const float scale = 1 / std::sqrt((sum(squares) + rest) / float(n) + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, mul(mul(load(x + i), set1(scale)), load(gain + i)));
    for (; i < n; i++) out[i] = x[i] * scale * gain[i];
}

inline void rms_norm(const float* x, const float* gain, float eps, int rows, int n, float* out) {
    each_row(rows, n, [=](int row) { norm_row(x + size_t(row) * n, gain, eps, n, out + size_t(row) * n); });
}

// silu(gate) · up of [rows][2 n], gate first.
inline void silu_mul(const float* gate_up, int rows, int n, float* out) {
    each_row(rows, 4 * size_t(n), [=](int row) {
        const float *gate = gate_up + size_t(row) * 2 * n, *up = gate + n;
        float* to = out + size_t(row) * n;
        int i = 0;
        for (; i + W <= n; i += W) {
            const F g = load(gate + i), divisor = add(set1(1), exp(sub(zero(), g)));
            store(to + i, mul(div(g, divisor), load(up + i)));
        }
        for (; i < n; i++) to[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    });
}

// Turns the pairs (i, i + n / 2) of a head by the angles of cos and sin [n / 2].
inline void rotate_head(const float* x, const float* cos, const float* sin, int n, float* out) {
    const int half = n / 2;
    int i = 0;
    for (; i + W <= half; i += W) {
        const F low = load(x + i), high = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, sub(mul(low, c), mul(high, s)));
        store(out + half + i, fma(low, s, mul(high, c)));
    }
    for (; i < half; i++) {
        const float low = x[i], high = x[half + i];
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[i] + low * sin[i];
    }
}

template <class E> void write_heads(const Write& a, int row) {
    using T = typename E::Stored;
    const int n = a.head_dim, heads = a.q_heads + 2 * a.kv_heads;
    const float* x = a.qkv + size_t(row) * heads * n;
    const float *cos = a.cos + size_t(row) * (n / 2), *sin = a.sin + size_t(row) * (n / 2);
    float normed[kMostHeadDim], turned[kMostHeadDim];
    for (int h = 0; h < a.q_heads + a.kv_heads; h++, x += n) {
        const bool is_q = h < a.q_heads;
        const float* from = x;
        if (const float* gain = is_q ? a.q_gain : a.k_gain) norm_row(x, gain, a.eps, n, normed), from = normed;
        if (is_q) {
            rotate_head(from, cos, sin, n, a.q + (size_t(row) * a.q_heads + h) * n);
            continue;
        }
        rotate_head(from, cos, sin, n, turned);
        T* to = static_cast<T*>(a.k) + a.slots[row] * a.slot_stride + (h - a.q_heads) * a.head_stride;
        for (int i = 0; i < n; i++) to[i] = E::narrow(turned[i]);
    }
    for (int h = 0; h < a.kv_heads; h++, x += n) {
        T* to = static_cast<T*>(a.v) + a.slots[row] * a.slot_stride + h * a.head_stride;
        for (int i = 0; i < n; i++) to[i] = E::narrow(x[i]);
    }
}

template <class E> void write_kv(const Write& a) {
    each_row(a.rows, 4 * size_t(a.q_heads + 2 * a.kv_heads) * a.head_dim, [&](int row) { write_heads<E>(a, row); });
}

}  // namespace fuel::FUEL_ISA
