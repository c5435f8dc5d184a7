/* Memory, as far as the host asks the driver itself and not CUDA's runtime library. The device's is the host's. */
#define _GNU_SOURCE
#include "stub.h"

#include <sys/mman.h>
#include <unistd.h>

#define MOST_RANGES 64

static struct range {
    uintptr_t start;
    size_t bytes;
} ranges[MOST_RANGES];

/* The allocation that holds all of [address, address + bytes), or NULL. */
static struct range *range_of(uintptr_t address, size_t bytes) {
    for (struct range *one = ranges; one < ranges + MOST_RANGES; one++)
        if (one->start <= address && address + bytes <= one->start + one->bytes) return one;
    return NULL;
}

/* Recorded: bytes. */
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    BEGIN(" %zu", bytes);
    NEED(!stub_capturing(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    struct range *free_one = ranges;
    while (free_one < ranges + MOST_RANGES && free_one->bytes) free_one++;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(at != MAP_FAILED && free_one < ranges + MOST_RANGES, CUDA_ERROR_OUT_OF_MEMORY);
    *free_one = (struct range){(uintptr_t)at, bytes};
    *address = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

/* Recorded: bytes, kind of handle, flags. */
CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType kind,
                                       unsigned long long flags) {
    BEGIN(" %zu %d %llu", bytes, (int)kind, flags);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    NEED(kind == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD && !flags, CUDA_ERROR_INVALID_VALUE);
    NEED(range_of(address, bytes) && address % page == 0 && bytes % page == 0, CUDA_ERROR_INVALID_VALUE);
    *(int *)handle = memfd_create("stub dma-buf", MFD_CLOEXEC);
    return CUDA_SUCCESS;
}

/* Recorded: target, scope. */
CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
    BEGIN(" %d %d", (int)target, (int)scope);
    NEED(stub_context, CUDA_ERROR_INVALID_CONTEXT);
    NEED(target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}
