// A dispatch that is open: the block of each channel sends its tokens, and takes the rows out that come. The counterpart
// of triton/normal_dispatch.py where all peers are mapped; both write the same rings and tell the same words, so that
// ranks may differ in which one they run.

#include "pieces.cuh"

constexpr int META_WORDS = 2 * TOPK + SCALE_WORDS;

struct Tensors {
    word x;                         // [tokens, ROW bytes]
    const long long* topk_idx;      // [tokens, TOPK]
    const unsigned* weights;        // likewise, float32
    const unsigned* scales;         // [tokens, SCALE_WORDS]
    word out;                       // [capacity, ROW bytes]
    long long* out_idx;             // [capacity, TOPK]
    unsigned *out_weights, *out_scales;
    word capacity;
    int local_experts, meta_words;
};

// One lane of a warp asks for its word of the meta of a token for a rank.
__device__ __forceinline__ unsigned meta_word(const Tensors& tensors, word token, int rank, int place) {
    if (place < 2 * TOPK) {
        const int slot = place < TOPK ? place : place - TOPK;
        const long long expert = tensors.topk_idx[token * TOPK + slot] - static_cast<long long>(rank) * tensors.local_experts;
        const bool local = expert >= 0 && expert < tensors.local_experts;
        if (place < TOPK) {
            return local ? static_cast<unsigned>(expert) : ~0u;
        }
        return local ? tensors.weights[token * TOPK + slot] : 0;
    }
    return place < META_WORDS ? tensors.scales[token * SCALE_WORDS + place - 2 * TOPK] : 0;
}

// put(rank, address of the row in its ring) for each rank that gets a row of this turn.
template <class Put>
__device__ __forceinline__ void to_each_rank(const Channel& one, const Turn& turn, int row, Put put) {
    int pipe = first_pipe(one);
    for (int step = 0; step < one.ranks; ++step, pipe = pipe + 1 < one.ranks ? pipe + 1 : 0) {
        if (passes(turn, pipe, row)) {
            const int place = turn.sent[pipe] + before(turn, pipe, row);
            put(pipe, row_at(turn.out_ring[pipe], turn.out_rows[pipe], one, place));
        }
    }
}

// Put the first `rows` tokens of this turn, from `token` on, into the pipes of their ranks.
__device__ __forceinline__ void send(
    const Channel& one, const Turn& turn, Slots& slots, Part part, const Tensors& tensors, word token, int rows) {
    const int lane = threadIdx.x % 32;
    auto from = [&](Piece piece) { return tensors.x + (token + piece.row) * ROW + piece.offset(); };
    auto to = [&](Piece piece, char* memory) {
        // all copies first: a meta waits for what it is made of
        if (slots.copies) {
            to_each_rank(one, turn, piece.row, [&](int, word target) {
                bulk_store(global<void>(target + piece.offset()), memory, piece.size());
            });
        }
        if (piece.part == 0) {
            to_each_rank(one, turn, piece.row, [&](int pipe, word target) {
                unsigned* const meta = global<unsigned>(target + ROW);
                for (int index = lane; index < tensors.meta_words; index += 32) {
                    meta[index] = meta_word(tensors, token + piece.row, pipe, index);
                }
            });
        }
    };
    move_pieces(slots, part, rows, from, to);
}

// Bring the meta of a row to the outputs.
__device__ __forceinline__ void take_meta(
    Turn& turn, const Tensors& tensors, const unsigned* meta, word row, int pipe) {
    const int lane = threadIdx.x % 32;
    bool wrong = false;
    for (int place = lane; place < META_WORDS; place += 32) {
        const unsigned value = meta[place];
        if (place < TOPK) {
            const int expert = static_cast<int>(value);
            const bool known = expert >= -1 && expert < tensors.local_experts;
            tensors.out_idx[row * TOPK + place] = known ? expert : -1;
            wrong |= !known;
        } else if (place < 2 * TOPK) {
            tensors.out_weights[row * TOPK + place - TOPK] = value;
        } else {
            tensors.out_scales[row * SCALE_WORDS + place - 2 * TOPK] = value;
        }
    }
    int& bad = turn.bad[threadIdx.x / 32];
    if (__ballot_sync(~0u, wrong) != 0 && lane == 0 && (bad == 0 || pipe < bad - 1)) {
        bad = pipe + 1;
    }
}

// Take `rows` rows out of all pipes.
__device__ __forceinline__ void receive(
    const Channel& one, Turn& turn, Slots& slots, Part part, const Tensors& tensors, int rows) {
    Rows loading = {first_pipe(one)}, storing = loading;
    auto from = [&](Piece piece) {
        const int row = loading.find(one, turn, piece.row), pipe = loading.pipe;
        return row_at(turn.in_ring[pipe], turn.in_rows[pipe], one, turn.taken[pipe] + row) + piece.offset();
    };
    auto to = [&](Piece piece, char* memory) {
        const int place = storing.find(one, turn, piece.row), pipe = storing.pipe, index = turn.taken[pipe] + place;
        const word source = row_at(turn.in_ring[pipe], turn.in_rows[pipe], one, index);
        const word row = turn.first[pipe] + index;
        // rows that were not promised are left where they landed
        if (row < tensors.capacity) {
            if (slots.copies) {
                bulk_store(global<void>(tensors.out + row * ROW + piece.offset()), memory, piece.size());
            }
            if (piece.part == 0) {
                take_meta(turn, tensors, global<const unsigned>(source + ROW), row, pipe);
            }
        }
    };
    move_pieces(slots, part, rows, from, to);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) uccl_ep_copy_dispatch(
    word context, word state, word channels, word meta_bytes, word local_experts, word capacity,
    const unsigned char* in_rank, word tokens, word x, const long long* topk_idx, const unsigned* weights,
    const unsigned* scales, word out, long long* out_idx, unsigned* out_weights, unsigned* out_scales) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Turn turn;
    __shared__ mbarrier full[WARPS * SLOTS];
    const Channel one = channel_of(context, state, channels, ROW + meta_bytes);
    if (!is_open(one)) {
        return;
    }
    const Tensors tensors = {x, topk_idx, weights, scales, out, out_idx, out_weights, out_scales,
                             capacity, static_cast<int>(local_experts), static_cast<int>(meta_bytes / 4)};
    Pipe mine = begin_pipe(one, turn);
    Slots slots = begin_slots(memory, full);
    Tokens own = tokens_of(one, tokens);
    Wait wait = begin_wait();
    int found = GOING;
    while (found == GOING) {
        found = look(one, turn, mine, false);
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
            rows = plan(one, turn, in_rank + own.next * one.ranks, many, turn.sent, turn.limit, turn.send);
        }
        const int copies = copies_of(one, turn, rows);
        send(one, turn, slots, part_of(copies, moved, false), tensors, own.next, rows);
        receive(one, turn, slots, part_of(copies, moved, true), tensors, moved);
        int sent = 0, taken = 0;
        if (mine.live) {
            sent = turn.sent[threadIdx.x] + (own.next < own.end ? before(turn, threadIdx.x, rows) : 0);
            taken = turn.taken[threadIdx.x] + turn.many[threadIdx.x];
        }
        if (slots.copies) {
            wait_stores<0>();
        }
        own.next += rows;
        found = end_turn(one, turn, mine, sent, taken, moved + rows, false, wait);
    }
    end_turns(one, turn, mine, found, false);
    end_operation(one);
}
