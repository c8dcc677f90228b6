#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() {}
#endif

namespace fuel {
namespace {

// Workers watch for a job this long, less than a millisecond, before they sleep: longer than what a step does between
// its calls, shorter than a scheduler's slice.
constexpr int kSpins = 20000;

// The caller works too and waits only for those that have joined, so a worker that sleeps through a job,
// or that a fork left behind, costs speed and nothing else.
class Pool {
public:
    void resize(int count) { wanted_ = count; }
    int size() const { return wanted_; }

    void run(int count, void (*body)(const void*, int), const void* context) {
        if (count <= 1 || wanted_ <= 1 || busy_.exchange(true)) {
            for (int i = 0; i < count; i++) body(context, i);
            return;
        }
        if (int(workers_.size()) != wanted_ - 1) restart();
        if (workers_.empty()) {
            busy_.store(false);
            for (int i = 0; i < count; i++) body(context, i);
            return;
        }
        body_ = body, context_ = context, count_ = count;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true);
        epoch_.fetch_add(1);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        work();
        open_.store(false);
        for (int spins = 0; active_.load() > 0; spins++) spins < kSpins ? relax() : void(sched_yield());
        busy_.store(false);
    }

private:
    void work() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) body_(context_, i);
    }

    void restart() {
        stop();
        quit_ = false;
        try {
            for (int i = 1; i < wanted_; i++) workers_.emplace_back([this, seen = epoch_.load()] { serve(seen); });
        } catch (const std::system_error&) {  // the system gives no more: those that there are do the work
            wanted_ = int(workers_.size()) + 1;
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(sleep_);
            quit_ = true;
            wake_.notify_all();
        }
        for (std::thread& worker : workers_) worker.join();
        workers_.clear();
    }

    void serve(unsigned seen) {
        while (!quit_) {
            for (int spins = 0; epoch_.load() == seen && spins < kSpins; spins++) relax();
            if (epoch_.load() == seen) {
                std::unique_lock<std::mutex> lock(sleep_);
                asleep_++;
                wake_.wait(lock, [&] { return quit_ || epoch_.load() != seen; });
                asleep_--;
                continue;
            }
            seen = epoch_.load();
            active_++;
            if (open_.load()) work();
            active_--;
        }
    }

    std::mutex sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<int> wanted_{1}, next_{0}, active_{0}, asleep_{0};
    std::atomic<unsigned> epoch_{0};
    std::atomic<bool> busy_{false}, open_{false}, quit_{false};
    void (*body_)(const void*, int) = nullptr;
    const void* context_ = nullptr;
    int count_ = 0;
};

// Never destroyed, since its threads outlive static objects; a new one in the child of a fork.
Pool*& pool() {
    static Pool* one = [] {
        pthread_atfork(nullptr, nullptr, [] {
            const int count = pool()->size();
            pool() = new Pool;  // the old one's threads and locks stayed in the parent
            pool()->resize(count);
        });
        return new Pool;
    }();
    return one;
}

}  // namespace

void set_threads(int count) { pool()->resize(count < 1 ? 1 : count); }
int threads() { return pool()->size(); }

void detail::run(int count, void (*body)(const void*, int), const void* context) { pool()->run(count, body, context); }

}  // namespace fuel
