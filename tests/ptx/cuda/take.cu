// Rows that a peer's bulk copies have written, read by threads once it has said so.

#include "words.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) take(const word* rows, int words, word* out, const word* told) {
    if (threadIdx.x == 0) {
        while (load_acquire_sys(told) == 0) {
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < words; at += THREADS) {
        out[at] = rows[at];
    }
}
