// Rows on their way through shared memory, in pieces of PIECE bytes (the last of a row perhaps shorter). Each warp has
// SLOTS of them: while it stores one, others are loaded. One lane of a warp copies, all lanes may read and write between.

#pragma once

#include "bulk.cuh"
#include "channel.cuh"

constexpr int PIECES = (ROW + PIECE - 1) / PIECE;
static_assert(PIECE % 16 == 0 && ROW % 16 == 0, "bulk copies move sixteen bytes at a time");
// Of the slots of a warp, so many may still be read by stores while the next piece is loaded; the others are ahead.
constexpr int STORING = SLOTS - (SLOTS / 2 + 1);
constexpr int AHEAD = SLOTS - STORING;
static_assert(STORING >= 0 && AHEAD > 1, "a slot is loaded while another one is stored");

// A part of a row of this turn.
struct Piece {
    int row, part;

    __device__ word offset() const { return static_cast<word>(part) * PIECE; }

    __device__ int size() const { return part + 1 < PIECES ? PIECE : ROW - (PIECES - 1) * PIECE; }
};

// The pieces of a row follow each other, beginning with another one in each row: with the first one goes the meta, which
// would else be the work of few warps.
__device__ __forceinline__ Piece piece_of(int number) {
    const int row = number / PIECES;
    return {row, (number + row) % PIECES};
}

// The warps that do one of two things that a block does in a turn.
struct Part {
    int first, warps;

    __device__ int index() const { return threadIdx.x / 32 - first; }

    __device__ bool has() const { return index() >= 0 && index() < warps; }
};

// The first or the second of two things of `one` and `other` copies: warps are dealt to them, so that both go on.
__device__ __forceinline__ Part part_of(int one, int other, bool second) {
    int warps = one + other == 0 ? WARPS : (WARPS * one + (one + other) / 2) / (one + other);
    if (one > 0 && other > 0) {
        warps = warps < 1 ? 1 : warps > WARPS - 1 ? WARPS - 1 : warps;
    }
    return second ? Part{warps, WARPS - warps} : Part{0, warps};
}

// The slots of a warp.
struct Slots {
    char* memory;     // SLOTS of PIECE bytes
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
    __device__ char* take(bool waits) {
        const int number = taken++, slot = number % SLOTS;
        if (waits) {
            wait_phase(full + slot, number / SLOTS & 1);
        }
        return memory + slot * PIECE;
    }
};

// All threads; a barrier stands behind it.
__device__ __forceinline__ Slots begin_slots(char* shared, mbarrier* full) {
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

// Move the pieces of `rows` rows, as one part of a block. from(piece) is where one is loaded from; to(piece, memory) has it
// stored by the lane that copies, in which its bytes are there; other lanes may write meta there. Both are asked in
// ascending order.
template <class From, class To>
__device__ __forceinline__ void move_pieces(Slots& slots, Part part, int rows, From from, To to) {
    const int many = rows * PIECES;
    if (!part.has()) {
        return;
    }
    int next = part.index();
    for (int number = next; number < many; number += part.warps) {
        // before the first piece several are loaded, then one for each
        for (; next < many && next < number + AHEAD * part.warps; next += part.warps) {
            if (slots.copies) {
                // the store that read the slot last has read it
                wait_read<STORING>();
            }
            const Piece piece = piece_of(next);
            slots.load(global<const void>(from(piece)), piece.size());
        }
        to(piece_of(number), slots.take(slots.copies));
        if (slots.copies) {
            commit();
        }
        __syncwarp();
    }
}
