// Bulk copies between global and shared memory (sm_90 and newer), and what orders them: one function for each instruction.
//
// A copy is no access of the thread that issues it. It belongs to the async proxy, happens later, sixteen bytes by
// sixteen and in any order, beside all other copies (PTX ISA: Asynchronous operations; cp.async.bulk). So a kernel says
//
//   what is there before a copy starts    fence_shared, fence_global: between writes of threads and copies that read or
//                                         overwrite them, after the acquire or before the barrier that tells the issuer.
//                                         What threads have only read, and what copies wrote for which this thread has
//                                         waited, needs no fence
//   that a copy to shared memory is over  wait_phase: then everybody who has waited finds the bytes
//   that a copy from shared memory ...    wait_read: its part of shared memory may be written again
//                                         wait_stores: this thread finds the bytes; a release tells others
//
// Addresses and sizes are multiples of 16. The tensor memory accelerator also reaches memory of peers.

#pragma once

// True in one thread of a warp, of which all have come here.
__device__ __forceinline__ bool is_elected() {
    unsigned elected;
    asm volatile(
        "{\n"
        ".reg .pred mine;\n"
        "elect.sync _|mine, -1;\n"
        "selp.u32 %0, 1, 0, mine;\n"
        "}"
        : "=r"(elected)
        :
        : "memory");
    return elected != 0;
}

// An mbarrier: eight bytes of shared memory that only these functions may access. A phase is over when all arrivals and
// all expected bytes are there; the next one begins at once. Bytes of a phase: at most 2^20 - 1.
using mbarrier = unsigned long long;

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// By one thread, before all others use it: that takes a barrier of the block, and copies take fence_mbarriers before it.
__device__ __forceinline__ void make_mbarrier(mbarrier* at, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(arrivals) : "memory");
}

// Copies find what this thread has made.
__device__ __forceinline__ void fence_mbarriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A release to all who wait for the phase.
__device__ __forceinline__ void arrive(mbarrier* at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(at)) : "memory");
}

// The same, and the phase is not over before so many bytes of copies have come. Who copies says so first: else the phase
// could be over without them.
__device__ __forceinline__ void arrive_expect(mbarrier* at, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(at)), "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity is over: 0 for the first one, 1 for the second, 0 for the third. It may say no too
// often. An acquire where it says yes.
__device__ __forceinline__ bool phase_is_over(mbarrier* at, unsigned parity) {
    unsigned over;
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}"
        : "=r"(over)
        : "r"(shared_address(at)), "r"(parity)
        : "memory");
    return over != 0;
}

// No clock is looked at: the copies of this GPU end.
__device__ __forceinline__ void wait_phase(mbarrier* at, unsigned parity) {
    while (!phase_is_over(at, parity)) {
    }
}

// Writes of threads to shared memory come before copies that are issued after this.
__device__ __forceinline__ void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory: between the acquire of a peer's flag and copies of what it has written.
__device__ __forceinline__ void fence_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// To shared memory; tells ``full``, which expects the bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, mbarrier* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

// From shared memory; of no group before ``commit``.
__device__ __forceinline__ void bulk_store(void* to, const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}

// What this thread has stored since the last time is a group.
__device__ __forceinline__ void commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All groups of this thread but the last LEFT have read shared memory.
template <int LEFT>
__device__ __forceinline__ void wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// All groups of this thread but the last LEFT are over: a release of this thread tells of what they have written.
template <int LEFT>
__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory");
}
