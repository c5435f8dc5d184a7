// Single words of global memory, with an order: release and acquire at the scope of the GPU, or of the system where a
// peer, a proxy or the host is at the other end. All other loads and stores are weak (PTX ISA, Memory Consistency Model).

#pragma once

using word = unsigned long long;

// What stands at an address of global memory, of this GPU, a peer's or the host's: told so that the compiler knows it.
template <class Type>
__device__ __forceinline__ Type* global(word at) {
    return static_cast<Type*>(__cvta_global_to_generic(at));
}

__device__ __forceinline__ word peek(word at) { return *global<const word>(at); }

__device__ __forceinline__ void poke(word at, word value) { *global<word>(at) = value; }

// Everything that this thread has done or heard of before is there for who acquires what is stored.
__device__ __forceinline__ void store_release_sys(word* at, word value) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ word load_acquire_sys(const word* at) {
    word value;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ word load_acquire_gpu(const word* at) {
    word value;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

// Both orders at once, for words that only blocks of this GPU change: the value before.
__device__ __forceinline__ word add_gpu(word* at, word value) {
    word before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
    return before;
}

__device__ __forceinline__ word exchange_gpu(word* at, word value) {
    word before;
    asm volatile("atom.acq_rel.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
    return before;
}

// Nanoseconds of a clock that all blocks share. Its steps are up to a microsecond.
__device__ __forceinline__ word clock_ns() {
    word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
