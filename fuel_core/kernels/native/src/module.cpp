// The kernels for Python. Tensors come as the addresses of their data: the caller has checked them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "packed.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using fuel::Element;
using fuel::Kernels;
using fuel::Kind;
using fuel::Matrix;

template <class T> T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

const Kernels* chosen = nullptr;

// Calls with the addresses that they were given, to be made again in order.
struct Tape {
    struct Call {
        const char* name;
        std::function<void()> make;
    };
    std::vector<Call> calls;
    std::vector<nb::object> kept;  // what the calls read, beside tensors
};

thread_local Tape* recording = nullptr;

template <class Call> void perform(const char* name, const Call& call) {
    if (recording) recording->calls.push_back({name, call});
    const nb::gil_scoped_release release;
    call();
}

void run(const Tape& tape) {
    const nb::gil_scoped_release release;
    for (const auto& call : tape.calls) call.make();
}

// Make the calls again; the name of each, and the nanoseconds that it took.
std::vector<std::pair<std::string, int64_t>> run_timed(const Tape& tape) {
    using Clock = std::chrono::steady_clock;
    std::vector<std::pair<std::string, int64_t>> out;
    const nb::gil_scoped_release release;
    for (const auto& call : tape.calls) {
        const auto start = Clock::now();
        call.make();
        out.emplace_back(call.name, std::chrono::nanoseconds(Clock::now() - start).count());
    }
    return out;
}

std::vector<std::string> names() {
    std::vector<std::string> out;
    for (const Kernels* each : fuel::available()) out.emplace_back(each->name);
    return out;
}

void use(const std::string& name) {
    for (const Kernels* each : fuel::available())
        if (each->name == name) {
            chosen = each;
            return;
        }
    throw std::invalid_argument("no kernels for " + name + " on this processor");
}

// Rows of one kind after another; data [rows, columns] as in a file.
void add_part(Matrix& matrix, Kind kind, uintptr_t data, int rows) {
    if (!fuel::row_bytes(kind, matrix.columns)) throw std::invalid_argument("a row is no whole number of blocks");
    const nb::gil_scoped_release release;
    fuel::pack(matrix, kind, at<const uint8_t>(data), rows);
}

// Give the whole pages of a mapped file's bytes back; they are read again where they are used.
void release(uintptr_t data, size_t bytes) {
    const uintptr_t page = sysconf(_SC_PAGESIZE), first = (data + page - 1) / page * page;
    const uintptr_t end = (data + bytes) / page * page;
    if (end > first) madvise(at<void>(first), end - first, MADV_DONTNEED);
}

void set_bias(Matrix& matrix, uintptr_t data) {
    matrix.bias.assign(at<const float>(data), at<const float>(data) + matrix.rows);
}

void linear(const nb::object& weight, uintptr_t x, int rows, uintptr_t residual, uintptr_t out) {
    const Matrix& w = nb::cast<const Matrix&>(weight);
    if (recording) recording->kept.push_back(weight);
    const auto* kernels = chosen;
    perform("product", [=, &w] { kernels->linear(w, at<const float>(x), rows, at<const float>(residual), at<float>(out)); });
}

// The ids of a replayed call have been checked by who binds them.
void embedding(Kind kind, uintptr_t data, int rows, int columns, uintptr_t ids, int count, uintptr_t out) {
    const size_t stride = fuel::row_bytes(kind, columns);
    for (int i = 0; i < count; i++)
        if (at<const int64_t>(ids)[i] < 0 || at<const int64_t>(ids)[i] >= rows) throw std::out_of_range("an id outside the vocabulary");
    perform("embedding", [=] {
        for (int i = 0; i < count; i++) {
            const uint8_t* row = at<const uint8_t>(data) + at<const int64_t>(ids)[i] * stride;
            fuel::expand(kind, row, columns, at<float>(out) + size_t(i) * columns);
        }
    });
}

void rms_norm(uintptr_t x, uintptr_t gain, float eps, int rows, int n, uintptr_t out) {
    const auto* kernels = chosen;
    perform("rms_norm", [=] { kernels->rms_norm(at<const float>(x), at<const float>(gain), eps, rows, n, at<float>(out)); });
}

void silu_mul(uintptr_t gate_up, int rows, int n, uintptr_t out) {
    const auto* kernels = chosen;
    perform("silu_mul", [=] { kernels->silu_mul(at<const float>(gate_up), rows, n, at<float>(out)); });
}

void add(uintptr_t x, uintptr_t y, size_t n, uintptr_t out) {
    perform("add", [=] {
        for (size_t i = 0; i < n; i++) at<float>(out)[i] = at<const float>(x)[i] + at<const float>(y)[i];
    });
}

void largest(uintptr_t x, int rows, int n, uintptr_t ids, uintptr_t values) {
    const nb::gil_scoped_release release;
    chosen->largest(at<const float>(x), rows, n, at<int64_t>(ids), at<float>(values));
}

// columns [4][rows]: temperatures, top_p, min_p, uniforms.
void draw(
    uintptr_t logits, bool is_double, int rows, int vocab, uintptr_t top_k, uintptr_t columns, double top_weight, uintptr_t out
) {
    const nb::gil_scoped_release release;
    const double* table = at<const double>(columns);
    chosen->draw(
        {at<const void>(logits), is_double, rows, vocab, at<const int32_t>(top_k), table, table + rows, table + 2 * rows,
         table + 3 * rows, top_weight},
        at<int64_t>(out)
    );
}

void write_kv(
    Element element, uintptr_t qkv, uintptr_t cos, uintptr_t sin, uintptr_t q_gain, uintptr_t k_gain, float eps,
    int rows, int q_heads, int kv_heads, int head_dim, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t slots,
    size_t slot_stride, size_t head_stride
) {
    const auto* kernels = chosen;
    const fuel::Write args{
        at<const float>(qkv), at<const float>(cos), at<const float>(sin), at<const float>(q_gain), at<const float>(k_gain),
        eps, rows, q_heads, kv_heads, head_dim, at<float>(q), at<void>(k), at<void>(v), at<const int64_t>(slots),
        slot_stride, head_stride};
    perform("write_kv", [=] { kernels->write_kv(element, args); });
}

void attention(
    Element element, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t table, uintptr_t lengths, uintptr_t counts,
    int sessions, int width, int block_size, int q_heads, int kv_heads, int head_dim, size_t block_stride,
    size_t slot_stride, size_t head_stride, float scale, uintptr_t out
) {
    const auto* kernels = chosen;
    const fuel::Attend args{
        at<const float>(q), at<const void>(k), at<const void>(v), at<const int32_t>(table), at<const int32_t>(lengths),
        at<const int32_t>(counts), sessions, width, block_size, q_heads, kv_heads, head_dim, block_stride, slot_stride,
        head_stride, scale, at<float>(out)};
    perform("attention", [=] { kernels->attention(element, args); });
}

}  // namespace

NB_MODULE(_native, m) {
    // An interpreter that ends while a model is alive has leaked nothing that anyone would miss.
    nb::set_leak_warnings(false);
    chosen = fuel::available().front();

    nb::enum_<Kind>(m, "Kind")
        .value("F32", Kind::F32)
        .value("BF16", Kind::Bf16)
        .value("F16", Kind::F16)
        .value("Q4_0", Kind::Q4_0)
        .value("Q4_1", Kind::Q4_1)
        .value("Q5_0", Kind::Q5_0)
        .value("Q5_1", Kind::Q5_1)
        .value("Q8_0", Kind::Q8_0)
        .value("Q4_K", Kind::Q4_K)
        .value("Q5_K", Kind::Q5_K)
        .value("Q6_K", Kind::Q6_K);
    nb::enum_<Element>(m, "Element")
        .value("F32", Element::F32)
        .value("BF16", Element::Bf16)
        .value("F16", Element::F16);
    nb::class_<Matrix>(m, "Matrix")
        .def(nb::init<int>(), "columns"_a)
        .def("add", add_part, "kind"_a, "data"_a, "rows"_a)
        .def("set_bias", set_bias, "data"_a)
        .def_ro("rows", &Matrix::rows)
        .def_ro("columns", &Matrix::columns)
        .def_prop_ro("nbytes", &Matrix::bytes);

    nb::class_<Tape>(m, "Tape")
        .def(nb::init<>())
        .def("start", [](Tape& self) { recording = &self; })
        .def("stop", [](Tape&) { recording = nullptr; })
        .def("run", run)
        .def("run_timed", run_timed)
        .def("__len__", [](const Tape& self) { return self.calls.size(); });

    m.def("available", names);
    m.def("chosen", [] { return std::string(chosen->name); });
    m.def("use", use, "name"_a);
    m.def("set_threads", fuel::set_threads, "count"_a);
    m.def("threads", fuel::threads);
    m.def("release", release);
    m.def("read_stream", fuel::read_stream);
    m.def("linear", linear);
    m.def("embedding", embedding);
    m.def("rms_norm", rms_norm);
    m.def("silu_mul", silu_mul);
    m.def("add", add);
    m.def("largest", largest);
    m.def("draw", draw);
    m.def("write_kv", write_kv);
    m.def("attention", attention);
    m.attr("MOST_HEAD_DIM") = fuel::kMostHeadDim;
}
