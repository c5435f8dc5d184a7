// Rows through a ring in shared memory: one thread has them copied in and out again, all threads change them in between.

#include "bulk.cuh"
#include "words.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    move(const word* from, word* to, int rows, int words, word change, const word* given, word* told) {
    extern __shared__ __align__(128) word ring[];
    __shared__ mbarrier full[STAGES];
    static_assert(STAGES > 1, "the slot of a row is loaded again while the next row is stored");
    const bool leads = threadIdx.x == 0;
    const unsigned bytes = words * sizeof(word);

    // the slot must be free
    auto load = [&](int row) {
        const int stage = row % STAGES;
        arrive_expect(&full[stage], bytes);
        bulk_load(ring + stage * words, from + row * words, bytes, &full[stage]);
    };

    if (leads) {
        for (int stage = 0; stage < STAGES; ++stage) {
            make_mbarrier(&full[stage], 1);
        }
        fence_mbarriers();
    }
    // all threads wait for phases of what one of them has made
    __syncthreads();
    if (leads) {
        while (load_acquire_sys(given) == 0) {
        }
        // threads of the peer have written the rows
        fence_global();
        for (int row = 0; row < STAGES && row < rows; ++row) {
            load(row);
        }
    }
    for (int row = 0; row < rows; ++row) {
        word* const slot = ring + row % STAGES * words;
        wait_phase(&full[row % STAGES], row / STAGES & 1);
        for (int at = threadIdx.x; at < words; at += THREADS) {
            slot[at] ^= change;
        }
        // each thread's writes, before the barrier that tells the one which has them copied
        fence_shared();
        __syncthreads();
        if (leads) {
            bulk_store(to + row * words, slot, bytes);
            commit();
            // the slot of the row before is free once its copy has read it, while that of this row goes on
            const int next = row - 1 + STAGES;
            if (row > 0 && next < rows) {
                wait_read<1>();
                load(next);
            }
        }
    }
    if (leads) {
        wait_stores<0>();
        store_release_sys(told, 1);
    }
}
