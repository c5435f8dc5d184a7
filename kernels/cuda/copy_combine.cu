// A combine that is open: the block of each channel gives rows back to their sources, and sums the rows of its own
// tokens. The counterpart of triton/normal_combine.py where all peers are mapped: the same sums, bit by bit, in
// ascending order of ranks, in float32, rounded once. Rows that are summed come to shared memory in bulk copies.

#include "pieces.cuh"
#include "floats.cuh"

// Of a piece, for each lane.
constexpr int VECTORS = (PIECE / 16 + 31) / 32;

struct Tensors {
    word x;                       // [received, ROW bytes]
    const unsigned* weights;      // float32 [received, TOPK]
    word received;
    word bias[2];                 // [tokens, ROW bytes]
    word out;                     // [tokens, ROW bytes]
    float* out_weights;           // [tokens, TOPK]
    int meta_words;
};

// Give `rows` rows to all pipes.
__device__ __forceinline__ void give(
    const Channel& one, const Turn& turn, Slots& slots, Part part, const Tensors& tensors, int rows) {
    const int lane = threadIdx.x % 32;
    Rows loading = {first_pipe(one)}, storing = loading;
    auto from = [&](Piece piece) {
        const int index = loading.find(one, turn, piece.row);
        const word row = turn.first[loading.pipe] + turn.sent[loading.pipe] + index;
        // of a dispatch that received more than was promised the rest is not there: any row is loaded
        return tensors.x + (row < tensors.received ? row : 0) * ROW + piece.offset();
    };
    auto to = [&](Piece piece, char* memory) {
        const int index = storing.find(one, turn, piece.row), pipe = storing.pipe, place = turn.sent[pipe] + index;
        const word row = turn.first[pipe] + place;
        const bool there = row < tensors.received;
        const word target = row_at(turn.out_ring[pipe], turn.out_rows[pipe], one, place);
        if (there) {
            if (slots.copies) {
                bulk_store(global<void>(target + piece.offset()), memory, piece.size());
            }
        } else {
            for (int at = 16 * lane; at < piece.size(); at += 512) {
                *global<uint4>(target + piece.offset() + at) = make_uint4(0, 0, 0, 0);
            }
        }
        if (piece.part == 0) {
            unsigned* const meta = global<unsigned>(target + ROW);
            for (int slot = lane; slot < tensors.meta_words; slot += 32) {
                meta[slot] = there && slot < TOPK ? tensors.weights[row * TOPK + slot] : 0;
            }
        }
    };
    move_pieces(slots, part, rows, from, to);
}

// The first row is taken as it is: added to zero it would lose the sign of a zero.
__device__ __forceinline__ void add(float (&total)[VALUES], const uint4& vector, bool first) {
    if (first) {
        widen(vector, total);
        return;
    }
    float part[VALUES];
    widen(vector, part);
    for (int at = 0; at < VALUES; ++at) {
        total[at] += part[at];
    }
}

// Sum the rows of `rows` tokens of this turn, from `token` on.
__device__ __forceinline__ void sum(
    const Channel& one, const Turn& turn, Slots& slots, Part part, const Tensors& tensors, word token, int rows) {
    if (!part.has()) {
        return;
    }
    const int lane = threadIdx.x % 32, many = rows * PIECES;
    auto row_of = [&](int pipe, int row) {
        const int place = turn.taken[pipe] + before(turn, pipe, row);
        return row_at(turn.in_ring[pipe], turn.in_rows[pipe], one, place);
    };
    // what is loaded next: of which piece, of which pipe at the earliest
    int number = part.index(), next = 0;
    auto load = [&] {
        for (; number < many; number += part.warps, next = 0) {
            const Piece piece = piece_of(number);
            for (; next < one.ranks; ++next) {
                if (passes(turn, next, piece.row)) {
                    slots.load(global<const void>(row_of(next, piece.row) + piece.offset()), piece.size());
                    ++next;
                    return;
                }
            }
        }
    };
    if (slots.copies) {
        // rows that are given have been read
        wait_read<0>();
    }
    for (int slot = 0; slot < SLOTS; ++slot) {
        load();
    }
    for (int mine = part.index(); mine < many; mine += part.warps) {
        const Piece piece = piece_of(mine);
        float total[VECTORS][VALUES] = {};
        bool first = true;
        for (int pipe = 0; pipe < one.ranks; ++pipe) {
            if (!passes(turn, pipe, piece.row)) {
                continue;
            }
            const uint4* const values = reinterpret_cast<const uint4*>(slots.take(true));
#pragma unroll
            for (int vector = 0; vector < VECTORS; ++vector) {
                if (16 * (32 * vector + lane) < piece.size()) {
                    add(total[vector], values[32 * vector + lane], first);
                }
            }
            first = false;
            // all lanes have read the slot
            __syncwarp();
            load();
        }
        const word offset = (token + piece.row) * ROW + piece.offset();
#pragma unroll
        for (int vector = 0; vector < VECTORS; ++vector) {
            const int at = 16 * (32 * vector + lane);
            if (at < piece.size()) {
                for (int bias = 0; bias < BIASES; ++bias) {
                    const word value = tensors.bias[bias] + offset + at;
                    add(total[vector], *global<const uint4>(value), first && bias == 0);
                }
                *global<uint4>(tensors.out + offset + at) = narrow(total[vector]);
            }
        }
        if (piece.part == 0) {
            for (int slot = lane; slot < TOPK; slot += 32) {
                float weight = 0;
                for (int pipe = 0; pipe < one.ranks; ++pipe) {
                    if (passes(turn, pipe, piece.row)) {
                        weight += global<const float>(row_of(pipe, piece.row) + ROW)[slot];
                    }
                }
                tensors.out_weights[(token + piece.row) * TOPK + slot] = weight;
            }
        }
    }
}

// Make the sums of the channel zero: the rows were not exchanged.
__device__ __forceinline__ void clear(const Tensors& tensors, const Tokens& own) {
    for (word at = own.next * ROW + 16 * threadIdx.x; at < own.end * ROW; at += 16 * THREADS) {
        *global<uint4>(tensors.out + at) = make_uint4(0, 0, 0, 0);
    }
    for (word at = own.next * TOPK + threadIdx.x; at < own.end * TOPK; at += THREADS) {
        tensors.out_weights[at] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) uccl_ep_copy_combine(
    word context, word state, word channels, word meta_bytes, const unsigned char* in_rank, word tokens, word x,
    word received, const unsigned* weights, word bias_0, word bias_1, word out, float* out_weights) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Turn turn;
    __shared__ mbarrier full[WARPS * SLOTS];
    const Channel one = channel_of(context, state, channels, ROW + meta_bytes);
    const Tensors tensors = {x, weights, received, {bias_0, bias_1}, out, out_weights,
                             static_cast<int>(meta_bytes / 4)};
    const Tokens all = tokens_of(one, tokens);
    if (!is_open(one)) {
        clear(tensors, all);
        return;
    }
    Pipe mine = begin_pipe(one, turn);
    Slots slots = begin_slots(memory, full);
    Tokens own = all;
    Wait wait = begin_wait();
    int found = GOING;
    while (found == GOING) {
        found = look(one, turn, mine, true);
        if (found != GOING) {
            break;
        }
        // threads or copies of peers have written what is copied from here on
        if (slots.copies) {
            fence_global();
        }
        const int moved = count_rows(one, turn);
        int rows = 0;
        if (own.next < own.end) {
            const int many = own.end - own.next < PIPE_STEP ? own.end - own.next : PIPE_STEP;
            rows = plan(one, turn, in_rank + own.next * one.ranks, many, turn.taken, turn.arrived, turn.receive);
        }
        // a token without rows has a sum as well, which is zero or the bias
        const int copies = copies_of(one, turn, rows), sums = copies > 0 ? copies : rows;
        give(one, turn, slots, part_of(moved, sums, false), tensors, moved);
        sum(one, turn, slots, part_of(moved, sums, true), tensors, own.next, rows);
        int sent = 0, taken = 0;
        if (mine.live) {
            sent = turn.sent[threadIdx.x] + turn.many[threadIdx.x];
            taken = turn.taken[threadIdx.x] + (own.next < own.end ? before(turn, threadIdx.x, rows) : 0);
        }
        if (slots.copies) {
            wait_stores<0>();
        }
        own.next += rows;
        found = end_turn(one, turn, mine, sent, taken, moved + rows, own.next < own.end, wait);
    }
    end_turns(one, turn, mine, found, true);
    if (has_failed(one, turn)) {
        clear(tensors, all);
    }
    end_operation(one);
}
