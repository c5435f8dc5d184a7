// Rows summed: a thread of the first warp has them copied, the second warp reads them and says which slots are free.

#include "bulk.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    sum(const unsigned long long* from, unsigned long long* out, int rows, int words) {
    extern __shared__ __align__(128) unsigned long long ring[];
    __shared__ mbarrier full[STAGES];
    __shared__ mbarrier empty[STAGES];

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_mbarrier(&full[stage], 1);
            make_mbarrier(&empty[stage], 32);
        }
        fence_mbarriers();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        if (is_elected()) {
            for (int row = 0; row < rows; ++row) {
                const int stage = row % STAGES, round = row / STAGES;
                // what threads have read needs no fence of a proxy before it is overwritten
                if (round > 0) {
                    wait_phase(&empty[stage], round - 1 & 1);
                }
                arrive_expect(&full[stage], words * 8);
                bulk_load(ring + stage * words, from + row * words, words * 8, &full[stage]);
            }
        }
        return;
    }
    unsigned long long total = 0;
    const int lane = threadIdx.x % 32;
    for (int row = 0; row < rows; ++row) {
        const int stage = row % STAGES;
        wait_phase(&full[stage], row / STAGES & 1);
        if (lane < words) {
            total += ring[stage * words + lane];
        }
        arrive(&empty[stage]);
    }
    if (lane < words) {
        out[lane] = total;
    }
}
