// The kernels, for the instruction set that the build names: compiled once for each.
#include "attention.h"
#include "kernels.h"
#include "pointwise.h"
#include "products.h"
#include "selection.h"

namespace fuel::FUEL_ISA {

static void write(Element element, const Write& args) {
    switch (element) {
    case Element::F32: return write_kv<F32>(args);
    case Element::Bf16: return write_kv<Bf16>(args);
    case Element::F16: return write_kv<F16>(args);
    }
}

static void attend(Element element, const Attend& args) {
    switch (element) {
    case Element::F32: return attention<F32>(args);
    case Element::Bf16: return attention<Bf16>(args);
    case Element::F16: return attention<F16>(args);
    }
}

extern const Kernels kernels;
const Kernels kernels{FUEL_NAME, linear, rms_norm, silu_mul, write, attend, largest_of_rows, draw};

}  // namespace fuel::FUEL_ISA
