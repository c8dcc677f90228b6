// The kernels of one instruction set, and the choice among them.
#pragma once

#include <cstdint>

#include "packed.h"

namespace fuel {

enum class Element { F32, Bf16, F16 };

// Norm where there are gains, rotate, and write into a cache: a row's slot is at slot · slot_stride, head h at
// h · head_stride beyond it, in elements.
struct Write {
    const float *qkv, *cos, *sin;  // [T, (Hq + 2 Hkv) D], [T, D / 2]
    const float *q_gain, *k_gain;  // [D], or null
    float eps;
    int rows, q_heads, kv_heads, head_dim;
    float* q;  // [T, Hq, D]
    void *k, *v;
    const int64_t* slots;  // [T]
    size_t slot_stride, head_stride;
};

// Causal attention: position p of head h of a session lies at block · block_stride + (p mod block_size) ·
// slot_stride + h · head_stride, in elements; the block is the table's, or the session's number without one.
struct Attend {
    const float* q;  // [T, Hq, D]
    const void *k, *v;
    const int32_t* table;    // [B, width], or null
    const int32_t* lengths;  // [B], keys of each session
    const int32_t* counts;   // [B], new tokens of each, the last of its keys
    int sessions, width, block_size, q_heads, kv_heads, head_dim;
    size_t block_stride, slot_stride, head_stride;
    float scale;
    float* out;  // [T, Hq, D]
};

constexpr int kMostHeadDim = 512;

// A token of each row: temperature, then top-k, top-p and min-p, ties kept; a uniform in [0, 1) says where in the order
// of the ids. A row with a NaN or without a finite largest gives 0.
struct Draw {
    const void* logits;  // float or double [rows][vocab]
    bool is_double;
    int rows, vocab;
    const int32_t* top_k;  // 0 keeps all
    const double *temperature, *top_p, *min_p, *uniforms;
    double top_weight;  // of the most probable token: a power of two that keeps a row's sum below 2^53
};

struct Kernels {
    const char* name;
    void (*linear)(const Matrix&, const float* x, int rows, const float* residual, float* out);
    void (*rms_norm)(const float* x, const float* gain, float eps, int rows, int n, float* out);
    void (*silu_mul)(const float* gate_up, int rows, int n, float* out);
    void (*write_kv)(Element, const Write&);
    void (*attention)(Element, const Attend&);
    void (*largest)(const float* x, int rows, int n, int64_t* ids, float* values);
    void (*draw)(const Draw&, int64_t* out);
};

// The sets that were compiled and that this processor runs, the best first.
std::vector<const Kernels*> available();

}  // namespace fuel
