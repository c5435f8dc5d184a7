// Single words of global memory, with an order: release and acquire at the scope of the GPU, or of the system where a
// peer, a proxy or the host is at the other end. All other loads and stores are weak (PTX ISA, Memory Consistency Model).

#pragma once

using word = unsigned long long;

// Everything that this thread has done or heard of before is there for who acquires what is stored.
__device__ __forceinline__ void store_release_sys(word* at, word value) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_gpu(word* at, word value) {
    asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
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
