// Rows on their way through shared memory, in pieces of PIECE bytes (the last of a row perhaps shorter). Each warp has
// SLOTS of them: while it stores one, others are loaded. One lane of a warp copies, all lanes may read and write between.

#pragma once

#include "bulk.cuh"
#include "channel.cuh"

constexpr int PIECES = (ROW + PIECE - 1) / PIECE;
static_assert(PIECE % 16 == 0 && ROW % 16 == 0, "bulk copies move sixteen bytes at a time");
// Slots that are loaded ahead; the stores of the others may still read theirs.
constexpr int AHEAD = SLOTS / 2 + 1;
static_assert(AHEAD < SLOTS + 1 && SLOTS > 1, "a slot is loaded while another one is stored");

__device__ __forceinline__ int piece_bytes(int piece) { return piece + 1 < PIECES ? PIECE : ROW - (PIECES - 1) * PIECE; }

// The slots of a warp.
struct Slots {
    bytes memory;     // SLOTS of PIECE bytes
    mbarrier* full;   // of each
    bool copies;      // this lane does
    int loaded;       // pieces so far: piece n is in slot n % SLOTS
    int taken;

    __device__ void load(const void* from, int size) {
        const int slot = loaded++ % SLOTS;
        if (copies) {
            arrive_expect(full + slot, size);
            bulk_load(memory + slot * PIECE, from, size, full + slot);
        }
    }

    // The oldest piece, which is there for whoever has waited. Not all lanes need.
    __device__ bytes take(bool waits) {
        const int number = taken++, slot = number % SLOTS;
        if (waits) {
            wait_phase(full + slot, number / SLOTS & 1);
        }
        return memory + slot * PIECE;
    }
};

// All threads; a barrier stands behind it.
__device__ __forceinline__ Slots begin_slots(bytes shared, mbarrier* full) {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < WARPS * SLOTS; ++slot) {
            make_mbarrier(full + slot, 1);
        }
        fence_mbarriers();
    }
    __syncthreads();
    return Slots{shared + warp * SLOTS * PIECE, full + warp * SLOTS, threadIdx.x % 32 == 0, 0, 0};
}

// Move this warp's share of `many` pieces. Number n is loaded from from(n); to(n, memory) has it stored by the lane
// that copies, in which the bytes are there; other lanes may write meta there. Both are asked in ascending order.
template <class From, class To>
__device__ __forceinline__ void move_pieces(Slots& slots, int many, From from, To to) {
    const int warp = threadIdx.x / 32;
    int next = warp;
    for (int piece = warp; piece < many; piece += WARPS) {
        // before the first piece several are loaded, then one for each
        for (; next < many && next < piece + AHEAD * WARPS; next += WARPS) {
            if (slots.copies) {
                // the store that read the slot last, that of piece next - SLOTS * WARPS, has read it
                wait_read<SLOTS - AHEAD>();
            }
            slots.load(global<const void>(from(next)), piece_bytes(next % PIECES));
        }
        to(piece, slots.take(slots.copies));
        if (slots.copies) {
            commit();
        }
        __syncwarp();
    }
}
