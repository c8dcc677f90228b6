// Working memory that a thread keeps, so that a step allocates nothing once it has run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "packed.h"

namespace fuel {

class Scratch {
public:
    static Scratch& of_thread() {
        thread_local Scratch one;
        return one;
    }

    // Returns what is taken within it; scopes nest.
    class Scope {
    public:
        explicit Scope(Scratch& scratch) : scratch_(scratch), block_(scratch.block_), used_(scratch.used_) {}
        ~Scope() { scratch_.block_ = block_, scratch_.used_ = used_; }
        Scope(const Scope&) = delete;

    private:
        Scratch& scratch_;
        size_t block_, used_;
    };

    // Memory for `count` values, aligned to a cache line and not cleared; it stays where it is.
    template <class T> T* take(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].size()) block_++, used_ = 0;
        if (block_ == blocks_.size()) blocks_.emplace_back(bytes > kLeast ? bytes : kLeast);
        T* out = reinterpret_cast<T*>(blocks_[block_].data() + used_);
        used_ += bytes;
        return out;
    }

private:
    static constexpr size_t kLeast = size_t(1) << 16;
    std::vector<Buffer> blocks_;
    size_t block_ = 0, used_ = 0;
};

}  // namespace fuel
