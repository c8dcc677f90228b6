#include "kernels.h"

namespace fuel {

namespace portable {
extern const Kernels kernels;
}
#ifdef FUEL_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_vnni {
extern const Kernels kernels;
}
#endif

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> found;
#ifdef FUEL_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&avx512_vnni::kernels);
    if (has_avx512) found.push_back(&avx512::kernels);
    if (has_avx2) found.push_back(&avx2::kernels);
#endif
    found.push_back(&portable::kernels);
    return found;
}

}  // namespace fuel
