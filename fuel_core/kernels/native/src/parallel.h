// One pool of threads for every kernel.
#pragma once

namespace fuel {

// The threads that work, the caller's among them. Takes hold at the next call.
void set_threads(int count);
int threads();

namespace detail {
void run(int count, void (*body)(const void*, int), const void* context);
}

// body(0) to body(count - 1), each once, in any order and on any thread; returns when all are done.
// Bodies may not throw. A call from within a body, or while another thread's runs, runs on its own thread.
template <class Body> void parallel_for(int count, const Body& body) {
    const auto call = [](const void* context, int i) { (*static_cast<const Body*>(context))(i); };
    detail::run(count, call, &body);
}

}  // namespace fuel
