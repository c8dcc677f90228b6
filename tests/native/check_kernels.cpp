// Checks every kernel of every instruction set that this processor runs against double precision, without Python:
// built with sanitizers, it also shows that no kernel reads or writes beyond what it was given.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "packed.h"
#include "parallel.h"

using namespace fuel;

namespace {

std::mt19937 generator(7);
int failures = 0, checks = 0;

double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(generator); }
int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

// Of exactly this size, so that a sanitizer sees the first byte beyond it.
std::vector<float> random_floats(size_t n, double scale = 1) {
    std::vector<float> out(n);
    for (float& x : out) x = float(uniform(-scale, scale));
    return out;
}

uint16_t half(float x) {
    _Float16 narrow = _Float16(x);
    uint16_t bits;
    std::memcpy(&bits, &narrow, 2);
    return bits;
}
uint16_t bfloat(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return uint16_t(bits >> 16);
}
float wide_bfloat(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
float wide_half(uint16_t x) {
    _Float16 narrow;
    std::memcpy(&narrow, &x, 2);
    return float(narrow);
}

void expect(const std::string& what, const std::vector<float>& got, const std::vector<double>& want, double limit) {
    double worst = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) {
        worst = std::fmax(worst, std::isnan(got[i]) ? INFINITY : std::fabs(got[i] - want[i]));
        size = std::fmax(size, std::fabs(want[i]));
    }
    checks++;
    if (worst <= limit * std::fmax(size, 1e-3)) return;
    failures++;
    std::printf("FAILED %s: off by %.3g where values reach %.3g\n", what.c_str(), worst, size);
}

struct Named {
    Kind kind;
    const char* name;
    std::vector<int> halves;  // offsets of a block's half-precision scales
    int bytes;
};
const std::vector<Named> kKinds = {
    {Kind::Q4_0, "Q4_0", {0}, 18},      {Kind::Q4_1, "Q4_1", {0, 2}, 20},   {Kind::Q5_0, "Q5_0", {0}, 22},
    {Kind::Q5_1, "Q5_1", {0, 2}, 24},   {Kind::Q8_0, "Q8_0", {0}, 34},      {Kind::Q4_K, "Q4_K", {0, 2}, 144},
    {Kind::Q5_K, "Q5_K", {0, 2}, 176},  {Kind::Q6_K, "Q6_K", {208}, 210},   {Kind::F32, "F32", {}, 4},
    {Kind::Bf16, "BF16", {}, 2},        {Kind::F16, "F16", {}, 2},
};

std::vector<uint8_t> random_rows(const Named& kind, int rows, int columns) {
    std::vector<uint8_t> data(row_bytes(kind.kind, columns) * rows);
    if (is_plain(kind.kind)) {
        for (int i = 0; i < rows * columns; i++) {
            const float x = float(uniform(-1, 1));
            const uint16_t narrow = kind.kind == Kind::F16 ? half(x) : bfloat(x);
            if (kind.kind == Kind::F32) std::memcpy(&data[i * 4], &x, 4);
            else std::memcpy(&data[i * 2], &narrow, 2);
        }
        return data;
    }
    for (uint8_t& byte : data) byte = uint8_t(integer(0, 255));
    for (size_t at = 0; at < data.size(); at += kind.bytes)
        for (int offset : kind.halves) {
            const uint16_t bits = half(float(uniform(0.005, 0.02)));
            std::memcpy(&data[at + offset], &bits, 2);
        }
    return data;
}

std::vector<double> expanded(Kind kind, const std::vector<uint8_t>& data, int rows, int columns) {
    std::vector<double> out;
    std::vector<float> row(columns);
    for (int r = 0; r < rows; r++) {
        const uint8_t* from = data.data() + r * row_bytes(kind, columns);
        for (int k = 0; k < columns; k++) {
            uint16_t narrow;
            if (kind == Kind::F32) std::memcpy(&row[k], from + 4 * k, 4);
            if (kind != Kind::Bf16 && kind != Kind::F16) continue;
            std::memcpy(&narrow, from + 2 * k, 2);
            row[k] = kind == Kind::F16 ? wide_half(narrow) : wide_bfloat(narrow);
        }
        if (!is_plain(kind)) expand(kind, from, columns, row.data());
        out.insert(out.end(), row.begin(), row.end());
    }
    return out;
}

// Inputs that a byte per value holds exactly, so that only the kernel's own rounding is left.
std::vector<float> exact_inputs(int rows, int columns) {
    std::vector<float> x(size_t(rows) * columns);
    for (size_t at = 0; at < x.size(); at += 32) {
        const float scale = std::ldexp(1.0f, integer(-9, -5));
        for (int i = 0; i < 32; i++) x[at + i] = scale * integer(-127, 127);
        x[at + integer(0, 31)] = 127 * scale;
    }
    return x;
}

void check_linear(const Kernels& kernels, const Named& first, const Named& second, int rows, int columns, int m) {
    Matrix matrix(columns);
    std::vector<double> weights;
    int out_rows = 0;
    for (const Named* kind : {&first, &second}) {
        const int n = kind == &first ? rows : 5;
        const std::vector<uint8_t> data = random_rows(*kind, n, columns);
        pack(matrix, kind->kind, data.data(), n);
        const std::vector<double> wide = expanded(kind->kind, data, n, columns);
        weights.insert(weights.end(), wide.begin(), wide.end());
        out_rows += n;
    }
    matrix.bias = random_floats(out_rows);
    const bool exact = columns % 32 == 0;
    const std::vector<float> x = exact ? exact_inputs(m, columns) : random_floats(size_t(m) * columns);
    const std::vector<float> residual = random_floats(size_t(m) * out_rows);
    std::vector<float> out(size_t(m) * out_rows);
    kernels.linear(matrix, x.data(), m, residual.data(), out.data());
    std::vector<double> want(out.size());
    for (int r = 0; r < m; r++)
        for (int n = 0; n < out_rows; n++) {
            double total = matrix.bias[n] + double(residual[size_t(r) * out_rows + n]);
            for (int k = 0; k < columns; k++) total += double(x[size_t(r) * columns + k]) * weights[size_t(n) * columns + k];
            want[size_t(r) * out_rows + n] = total;
        }
    const std::string what = std::string(kernels.name) + " linear " + first.name + "+" + second.name + " " +
                             std::to_string(m) + "x" + std::to_string(columns) + "x" + std::to_string(rows);
    expect(what, out, want, 3e-6);

    // One row by itself is the same to the bit.
    std::vector<float> alone(out_rows);
    kernels.linear(matrix, x.data() + size_t(m - 1) * columns, 1, residual.data() + size_t(m - 1) * out_rows, alone.data());
    checks++;
    if (std::memcmp(alone.data(), out.data() + size_t(m - 1) * out_rows, alone.size() * 4)) {
        failures++;
        std::printf("FAILED %s: a row depends on its company\n", what.c_str());
    }
}

void check_pointwise(const Kernels& kernels, int rows, int n) {
    const std::string what = std::string(kernels.name) + " " + std::to_string(rows) + "x" + std::to_string(n);
    const std::vector<float> x = random_floats(size_t(rows) * n, 3), gain = random_floats(n);
    std::vector<float> out(x.size());
    kernels.rms_norm(x.data(), gain.data(), 1e-5f, rows, n, out.data());
    std::vector<double> want(x.size());
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int i = 0; i < n; i++) squares += double(x[r * n + i]) * x[r * n + i];
        for (int i = 0; i < n; i++) want[r * n + i] = x[r * n + i] / std::sqrt(squares / n + 1e-5) * gain[i];
    }
    expect(what + " rms_norm", out, want, 1e-6);

    const std::vector<float> gate_up = random_floats(size_t(rows) * 2 * n, 30);
    kernels.silu_mul(gate_up.data(), rows, n, out.data());
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) {
            const double gate = gate_up[r * 2 * n + i];
            want[r * n + i] = gate / (1 + std::exp(-gate)) * gate_up[r * 2 * n + n + i];
        }
    expect(what + " silu_mul", out, want, 1e-6);

    std::vector<int64_t> top(rows);
    std::vector<float> values(rows);
    kernels.largest(x.data(), rows, n, top.data(), values.data());
    for (int r = 0; r < rows; r++) {
        int64_t most = 0;
        for (int i = 0; i < n; i++)
            if (x[r * n + i] > x[r * n + most]) most = i;
        checks++;
        if (top[r] == most && values[r] == x[r * n + most]) continue;
        failures++;
        std::printf("FAILED %s largest: %d, not %d\n", what.c_str(), int(top[r]), int(most));
    }
}

// A draw by the definition: sort, keep, and walk through the ids.
int64_t drawn(const std::vector<double>& x, double temperature, int top_k, double top_p, double min_p, double uniform, double unit) {
    std::vector<double> sorted = x;
    std::sort(sorted.rbegin(), sorted.rend());
    const double kth = top_k > 0 && top_k < int(x.size()) ? sorted[top_k - 1] : -INFINITY;
    std::vector<double> weights(x.size());
    for (size_t i = 0; i < x.size(); i++)
        weights[i] = x[i] >= kth ? std::nearbyint(std::exp((x[i] - sorted[0]) / temperature) * unit) : 0;
    sorted = weights;
    std::sort(sorted.rbegin(), sorted.rend());
    double total = 0, sum = 0, floor = 0;
    for (double w : weights) total += w;
    for (size_t i = 0; i < sorted.size() && sum < total * top_p; i++) sum += floor = sorted[i];
    floor = std::fmax(top_p < 1 ? floor : 0, min_p * unit);
    for (double& w : weights) w = w < floor ? 0 : w;
    total = sum = 0;
    for (double w : weights) total += w;
    for (size_t i = 0; i < weights.size(); i++)
        if ((sum += weights[i]) > uniform * total) return int64_t(i);
    return -1;
}

void check_draw(const Kernels& kernels, int vocab, bool is_double) {
    const int rows = 24;
    const double unit = std::ldexp(1.0, 53 - 32 + __builtin_clz(vocab));
    std::vector<float> x = random_floats(size_t(rows) * vocab, 9);
    for (size_t i = 0; i < x.size(); i += 3) x[i] = std::nearbyint(x[i]);  // some are tied
    const std::vector<double> wide(x.begin(), x.end());
    std::vector<int32_t> top_k;
    std::vector<double> temperature, top_p, min_p, uniforms;
    for (int r = 0; r < rows; r++) {
        top_k.push_back(r % 3 ? integer(0, vocab + 1) : 0), temperature.push_back(uniform(0.2, 2));
        top_p.push_back(r % 2 ? uniform(0.01, 1) : 1), min_p.push_back(r % 4 ? 0 : uniform(0, 0.5));
        uniforms.push_back(r ? uniform(0, 1) : 0);
    }
    std::vector<int64_t> out(rows);
    const void* logits = is_double ? static_cast<const void*>(wide.data()) : x.data();
    kernels.draw(
        {logits, is_double, rows, vocab, top_k.data(), temperature.data(), top_p.data(), min_p.data(), uniforms.data(), unit}, out.data()
    );
    for (int r = 0; r < rows; r++) {
        const std::vector<double> row(wide.begin() + size_t(r) * vocab, wide.begin() + size_t(r + 1) * vocab);
        const int64_t want = drawn(row, temperature[r], top_k[r], top_p[r], min_p[r], uniforms[r], unit);
        checks++;
        if (out[r] == want) continue;
        failures++;
        std::printf("FAILED %s draw %d of %d: %d, not %d\n", kernels.name, r, vocab, int(out[r]), int(want));
    }
}

struct Cached {
    Element element;
    std::vector<float> f32;
    std::vector<uint16_t> narrow;

    Cached(Element e, size_t n) : element(e), f32(e == Element::F32 ? n : 0), narrow(e == Element::F32 ? 0 : n) {}
    void* data() { return element == Element::F32 ? static_cast<void*>(f32.data()) : narrow.data(); }
    double at(size_t i) const {
        return element == Element::F32 ? f32[i] : element == Element::F16 ? wide_half(narrow[i]) : wide_bfloat(narrow[i]);
    }
    void poison() {
        for (float& x : f32) x = NAN;
        for (uint16_t& x : narrow) x = 0x7fff;
    }
    double step() const { return element == Element::F32 ? 1e-6 : element == Element::F16 ? 6e-4 : 5e-3; }
};

// Writes the keys and values of some sessions to a poisoned pool, then attends over them.
void check_attention(
    const Kernels& kernels, Element element, int block_size, int q_heads, int kv_heads, int dim, bool normed,
    const std::vector<int>& lengths, const std::vector<int>& counts
) {
    const int sessions = int(lengths.size());
    int width = 1, blocks = 1;
    for (int length : lengths) width = std::max(width, (length + block_size - 1) / block_size);
    std::vector<int32_t> table(size_t(sessions) * width, -1), order;
    for (int i = 0; i < sessions * width; i++) order.push_back(blocks++);
    std::shuffle(order.begin(), order.end(), generator);
    Cached k(element, size_t(blocks) * block_size * kv_heads * dim), v = k;
    k.poison(), v.poison();

    const std::string what = std::string(kernels.name) + " attention element " + std::to_string(int(element)) +
                             " block " + std::to_string(block_size) + " heads " + std::to_string(q_heads) + "/" +
                             std::to_string(kv_heads) + "x" + std::to_string(dim);
    std::vector<float> all_q;
    for (int s = 0; s < sessions; s++) {
        const int used = (lengths[s] + block_size - 1) / block_size;
        for (int i = 0; i < used; i++) table[size_t(s) * width + i] = order[s * width + i];
        const int n = lengths[s], heads = q_heads + 2 * kv_heads;
        const std::vector<float> qkv = random_floats(size_t(n) * heads * dim), angles = random_floats(size_t(n) * (dim / 2), 3);
        const std::vector<float> q_gain = random_floats(dim), k_gain = random_floats(dim);
        std::vector<float> cos, sin;
        for (float a : angles) cos.push_back(std::cos(a)), sin.push_back(std::sin(a));
        std::vector<int64_t> slots;
        for (int p = 0; p < n; p++) slots.push_back(int64_t(table[size_t(s) * width + p / block_size]) * block_size + p % block_size);
        std::vector<float> q(size_t(n) * q_heads * dim);
        kernels.write_kv(
            element, {qkv.data(), cos.data(), sin.data(), normed ? q_gain.data() : nullptr, normed ? k_gain.data() : nullptr,
                      1e-6f, n, q_heads, kv_heads, dim, q.data(), k.data(), v.data(), slots.data(),
                      size_t(kv_heads) * dim, size_t(dim)}
        );
        std::vector<float> got;
        std::vector<double> want;
        for (int p = 0; p < n; p++)
            for (int h = 0; h < q_heads + kv_heads; h++) {
                const float* x = qkv.data() + (size_t(p) * heads + h) * dim;
                const float* gain = h < q_heads ? q_gain.data() : k_gain.data();
                std::vector<double> row(x, x + dim);
                double squares = 0;
                for (double y : row) squares += y * y;
                if (normed)
                    for (int i = 0; i < dim; i++) row[i] = row[i] / std::sqrt(squares / dim + 1e-6) * gain[i];
                for (int i = 0; i < dim; i++) {
                    const int pair = i % (dim / 2);
                    const double c = cos[size_t(p) * (dim / 2) + pair], sn = sin[size_t(p) * (dim / 2) + pair];
                    want.push_back(i < dim / 2 ? row[i] * c - row[i + dim / 2] * sn : row[i] * c + row[pair] * sn);
                    const size_t at = (size_t(slots[p]) * kv_heads + h - q_heads) * dim + i;
                    got.push_back(h < q_heads ? q[(size_t(p) * q_heads + h) * dim + i] : float(k.at(at)));
                }
            }
        expect(what + " write", got, want, k.step());
        all_q.insert(all_q.end(), q.end() - size_t(counts[s]) * q_heads * dim, q.end());
    }
    std::vector<float> out(all_q.size());
    const std::vector<int32_t> lens(lengths.begin(), lengths.end()), news(counts.begin(), counts.end());
    const float scale = 1 / std::sqrt(float(dim));
    kernels.attention(
        element, {all_q.data(), k.data(), v.data(), table.data(), lens.data(), news.data(), sessions, width, block_size,
                  q_heads, kv_heads, dim, size_t(block_size) * kv_heads * dim, size_t(kv_heads) * dim, size_t(dim), scale, out.data()}
    );
    std::vector<double> want(out.size());
    size_t row = 0;
    for (int s = 0; s < sessions; s++)
        for (int t = 0; t < counts[s]; t++, row++)
            for (int h = 0; h < q_heads; h++) {
                const int seen = lengths[s] - counts[s] + t + 1;
                const auto at = [&](int p) {
                    const size_t slot = size_t(table[size_t(s) * width + p / block_size]) * block_size + p % block_size;
                    return (slot * kv_heads + h / (q_heads / kv_heads)) * dim;
                };
                std::vector<double> weights(seen);
                double top = -INFINITY, total = 0;
                for (int p = 0; p < seen; p++) {
                    for (int i = 0; i < dim; i++) weights[p] += all_q[(row * q_heads + h) * dim + i] * k.at(at(p) + i) * scale;
                    top = std::fmax(top, weights[p]);
                }
                for (double& w : weights) total += w = std::exp(w - top);
                for (int p = 0; p < seen; p++)
                    for (int i = 0; i < dim; i++) want[(row * q_heads + h) * dim + i] += weights[p] / total * v.at(at(p) + i);
            }
    expect(what, out, want, 3e-6);
}

}  // namespace

int main() {
    for (const Kernels* kernels : available())
        for (int threads : {1, 3}) {
            set_threads(threads);
            for (const Named& kind : kKinds) {
                const bool super = kind.bytes > 100;
                for (int m : {1, 2, 3, 5, 9, 13, 98})
                    check_linear(*kernels, kind, super ? kKinds[6] : kKinds[3], 37, super ? 512 : 96, m);
                check_linear(*kernels, kind, kind, 3, super ? 256 : 32, 4);
                check_linear(*kernels, kind, kind, 19, super ? 1280 : 1056, 11);
                if (is_plain(kind.kind)) check_linear(*kernels, kind, kKinds[8], 17, 77, 7);
            }
            for (int n : {1, 7, 16, 33, 576}) check_pointwise(*kernels, 1, n), check_pointwise(*kernels, 9, n);
            for (int vocab : {1, 7, 64, 77, 1003}) check_draw(*kernels, vocab, false), check_draw(*kernels, vocab, true);
            for (Element element : {Element::F32, Element::Bf16, Element::F16}) {
                check_attention(*kernels, element, 16, 9, 3, 64, false, {1, 15, 16, 17, 70}, {1, 1, 16, 2, 1});
                check_attention(*kernels, element, 4, 4, 4, 8, true, {5, 33}, {5, 9});
                check_attention(*kernels, element, 17, 6, 2, 20, true, {40}, {40});
                check_attention(*kernels, element, 1, 8, 1, 128, false, {3, 2}, {1, 2});
                check_attention(*kernels, element, 64, 3, 1, 32, false, {1100}, {1});
                check_attention(*kernels, element, 64, 2, 1, 96, true, {600, 1030}, {3, 30});
            }
        }
    std::printf("%d checks, %d failures\n", checks, failures);
    return failures != 0;
}
