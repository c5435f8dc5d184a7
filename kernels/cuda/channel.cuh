// A channel of normal mode, as the block that serves it has it: how far its pipes are, whom to blame, how it ends.
//
// protocol/pipe.py says what a pipe is, kernels/blocks what stands in the state block, and both are told by macros of
// the same names (kernels/cuda/blocks.py). The opening is a launch of its own, before (triton/normal_open.py). Every
// pipe here leads to a peer whose window is mapped, and thread p speaks for pipe p: it acquires what the peer tells and
// releases what this rank tells. All threads know what stands in Turn, behind a barrier.

#pragma once

#include "blocks.cuh"
#include "words.cuh"

using mask64 = unsigned long long;

constexpr int THREADS = 32 * WARPS;
static_assert(RANKS <= THREADS, "each pipe has a thread");
constexpr word EVERYTHING_ROWS = PIPE_EVERYTHING;
constexpr word NOBODY = ~0ull;
// Nanoseconds after which a waiting block looks again whether the host has given up: triton/wait.py says why.
constexpr word CHECK_NS = 20000;

// Why a block leaves its loop: all is done; a peer claimed what it must not; one is missing; somebody else has failed.
enum Found { GOING, DONE, CLAIMED, LATE, OVER };

struct Channel {
    word context, state;
    int index, channels, ranks, me;
    word stamp;
    word stride;  // bytes from one row of a ring to the next: a row and its meta

    __device__ word of(int offset) const { return peek(context + offset); }

    __device__ word entry(int table, int pipe) const {
        const word place = static_cast<word>(table * NORMAL_CHANNELS + index) * (2 * ranks) + pipe;
        return peek(state + 8 * (STATE_WORDS + place));
    }
};

__device__ __forceinline__ Channel channel_of(word context, word state, int channels, word stride) {
    Channel one;
    one.context = context, one.state = state, one.channels = channels, one.stride = stride;
    one.index = blockIdx.x;
    one.ranks = one.of(C_RANKS), one.me = one.of(C_RANK);
    one.stamp = (peek(one.state + W_NUMBER) + 1) << STAMP_SHIFT;
    return one;
}

// What all threads know of the pipes, in shared memory. In brackets: who writes it, before a barrier.
struct Turn {
    word in_ring[RANKS], out_ring[RANKS];             // addresses [thread p, once]
    int in_rows[RANKS], out_rows[RANKS];              // rows that they hold [thread p, once]
    int first[RANKS], send[RANKS], receive[RANKS];    // see the tables of those names [thread p, once]
    int arrived[RANKS], limit[RANKS];                 // [thread p, as a turn begins]
    int many[RANKS];                                  // rows that this turn takes out of, or gives to, the pipe [likewise]
    int sent[RANKS], taken[RANKS];                    // [thread p, as a turn ends]
    mask64 rows[RANKS];                               // of the next rows: those that pass the pipe [a warp]
    int fitting[RANKS];                               // of these rows: how many have room in it, or are there [a warp]
    // 1 + the rank to blame, on which stream, how many rows there were and should be; 0: nobody [thread p]
    int wrong[RANKS];
    word stream[RANKS], got[RANKS], want[RANKS];
    int bad[WARPS];                                   // 1 + a rank whose meta names no expert here [a warp]
    int found;                                        // [thread 0]
};

// What thread p alone knows of its pipe.
struct Pipe {
    bool live;
    int shown, freed;  // rows that the other end was told of: put in, taken out
    const word *arrived_here, *freed_here;
    word *arrived_there, *freed_there;
};

__device__ __forceinline__ Pipe begin_pipe(const Channel& one, Turn& turn) {
    Pipe mine = {};
    const int pipe = threadIdx.x;
    if (pipe < one.ranks) {
        mine.live = global<const int>(one.of(C_MASK))[pipe] == 0;
        const word here = peek(one.of(C_LANDING) + 8 * pipe);
        const word there = peek(one.of(C_PEER_WINDOW) + 8 * pipe);
        const word words = peek(one.state + W_PIPE_WORDS);
        auto place = [&](word window, int which, int end) {
            const word offset = static_cast<word>(which * NORMAL_CHANNELS + one.index) * (2 * one.ranks) + end;
            return global<word>(window + words + 8 * offset);
        };
        mine.arrived_here = place(here, PIPE_ARRIVED, pipe), mine.freed_here = place(here, PIPE_FREED, pipe);
        mine.arrived_there = place(there, PIPE_ARRIVED, one.me), mine.freed_there = place(there, PIPE_FREED, one.me);
        turn.in_ring[pipe] = one.entry(N_IN_RING, pipe), turn.out_ring[pipe] = one.entry(N_OUT_RING, pipe);
        turn.in_rows[pipe] = one.entry(N_IN_ROWS, pipe), turn.out_rows[pipe] = one.entry(N_OUT_ROWS, pipe);
        turn.first[pipe] = one.entry(N_FIRST, pipe);
        turn.send[pipe] = one.entry(N_SEND_ROWS, pipe), turn.receive[pipe] = one.entry(N_RECV_ROWS, pipe);
        turn.arrived[pipe] = turn.limit[pipe] = turn.sent[pipe] = turn.taken[pipe] = turn.many[pipe] = turn.wrong[pipe] = 0;
    }
    if (threadIdx.x < WARPS) {
        turn.bad[threadIdx.x] = 0;
    }
    return mine;
}

__device__ __forceinline__ void note_wrong(Turn& turn, int pipe, word stream, word got, word want) {
    turn.wrong[pipe] = pipe + 1;
    turn.stream[pipe] = stream, turn.got[pipe] = got, turn.want[pipe] = want;
}

// Rows that a stamped word tells of: none where an earlier operation wrote it.
__device__ __forceinline__ word stamped(const Channel& one, const word* at) {
    const word value = load_acquire_sys(at);
    return value >= one.stamp ? value - one.stamp : 0;
}

__device__ __forceinline__ word rows_stream(const Channel& one, bool combines) {
    return (combines ? NORMAL_COMBINE : NORMAL_DISPATCH) + one.index;
}

// How far the peers are, and whether this rank has failed. A barrier stands behind it: GOING when rows may be moved.
__device__ __forceinline__ int look(const Channel& one, Turn& turn, const Pipe& mine, bool combines) {
    const int pipe = threadIdx.x;
    if (mine.live) {
        const word arrived = stamped(one, mine.arrived_here), freed = stamped(one, mine.freed_here);
        const word sent = turn.sent[pipe], taken = turn.taken[pipe], receive = turn.receive[pipe];
        const word held = taken + turn.in_rows[pipe], most = receive < held ? receive : held;
        turn.arrived[pipe] = arrived;
        turn.limit[pipe] = (freed < sent ? freed : sent) + turn.out_rows[pipe];
        const int coming = turn.arrived[pipe] - turn.taken[pipe];
        const int room = (turn.send[pipe] < turn.limit[pipe] ? turn.send[pipe] : turn.limit[pipe]) - turn.sent[pipe];
        const int rows = combines ? room : coming;
        turn.many[pipe] = rows < 0 ? 0 : rows < PIPE_STEP ? rows : PIPE_STEP;
        // rule: normal mode: a peer tells of no more rows than it has, and of none that do not fit
        if (arrived > most || arrived < taken) {
            note_wrong(turn, pipe, rows_stream(one, combines), arrived, arrived < taken ? taken : most);
        }
        // rule: normal mode: a peer has read no more rows than there were
        if (freed > sent && freed != EVERYTHING_ROWS) {
            note_wrong(turn, pipe, rows_stream(one, !combines), freed, sent);
        }
    }
    if (threadIdx.x == 0) {
        turn.found = load_acquire_gpu(global<const word>(one.of(C_VERDICT))) != 0 ? OVER : GOING;
    }
    __syncthreads();
    int found = turn.found;
    for (int peer = 0; peer < one.ranks && found == GOING; ++peer) {
        found = turn.wrong[peer] != 0 ? CLAIMED : GOING;
    }
    for (int warp = 0; warp < WARPS && found == GOING; ++warp) {
        found = turn.bad[warp] != 0 ? CLAIMED : GOING;
    }
    return found;
}

// Of the next `rows` rows, at most 64: which pass each pipe, by bytes [rows, ranks] of marks, and how many have room in
// it (`base` rows have passed, `bound` may), or are there. A barrier stands behind it: how many fit all pipes.
__device__ __forceinline__ int plan(
    const Channel& one, Turn& turn, const unsigned char* marks, int rows, const int* base, const int* bound,
    const int* passing) {
    const int lane = threadIdx.x % 32;
    for (int pipe = threadIdx.x / 32; pipe < one.ranks; pipe += WARPS) {
        mask64 found = 0;
        int fitting = rows;
        // nobody waits for a rank that is masked, or that gets nothing
        if (passing[pipe] > 0) {
            const bool low = lane < rows && marks[static_cast<word>(lane) * one.ranks + pipe] != 0;
            const bool high = lane + 32 < rows && marks[static_cast<word>(lane + 32) * one.ranks + pipe] != 0;
            found = __ballot_sync(~0u, low) | static_cast<mask64>(__ballot_sync(~0u, high)) << 32;
            const int room = bound[pipe] - base[pipe];
            const bool fits = __popcll(found << (63 - lane)) <= room;
            const bool above = __popcll(found << (31 - lane)) <= room;
            const int many = __popc(__ballot_sync(~0u, fits)) + __popc(__ballot_sync(~0u, above));
            fitting = many < rows ? many : rows;
        }
        if (lane == 0) {
            turn.rows[pipe] = found, turn.fitting[pipe] = fitting;
        }
    }
    __syncthreads();
    int all = rows;
    for (int pipe = 0; pipe < one.ranks; ++pipe) {
        all = turn.fitting[pipe] < all ? turn.fitting[pipe] : all;
    }
    return all;
}

// Rows before `row` of this turn that pass the pipe.
__device__ __forceinline__ int before(const Turn& turn, int pipe, int row) {
    return row < 64 ? __popcll(turn.rows[pipe] & ((1ull << row) - 1)) : __popcll(turn.rows[pipe]);
}

__device__ __forceinline__ bool passes(const Turn& turn, int pipe, int row) { return turn.rows[pipe] >> row & 1; }

// The rows of this turn of all pipes one behind the other: which row of which pipe a number is. Numbers ascend.
struct Rows {
    int pipe;   // the present one
    int first;  // number of its first row

    // How many rows of its pipe come before it.
    __device__ int find(const Channel& one, const Turn& turn, int number) {
        while (number >= first + turn.many[pipe]) {
            first += turn.many[pipe];
            pipe = pipe + 1 < one.ranks ? pipe + 1 : 0;
        }
        return number - first;
    }
};

// Neither all ranks nor all channels of one begin with the same peer.
__device__ __forceinline__ int first_pipe(const Channel& one) { return (one.me + 1 + one.index) % one.ranks; }

__device__ __forceinline__ int count_rows(const Channel& one, const Turn& turn) {
    int rows = 0;
    for (int pipe = 0; pipe < one.ranks; ++pipe) {
        rows += turn.many[pipe];
    }
    return rows;
}

// How many places the first `rows` rows of the plan take in all pipes.
__device__ __forceinline__ int copies_of(const Channel& one, const Turn& turn, int rows) {
    int copies = 0;
    for (int pipe = 0; rows > 0 && pipe < one.ranks; ++pipe) {
        copies += before(turn, pipe, rows);
    }
    return copies;
}

// Address of a row in a ring.
__device__ __forceinline__ word row_at(word ring, int rows, const Channel& one, int place) {
    return ring + static_cast<word>(place % rows) * one.stride;
}

// End a turn: thread p's pipe is at these positions, and its peer is told. A barrier stands before it, behind which
// all copies of the turn are over, and one behind it.
__device__ __forceinline__ void advance(const Channel& one, Turn& turn, Pipe& mine, int sent, int taken) {
    const int pipe = threadIdx.x;
    if (mine.live) {
        turn.sent[pipe] = sent, turn.taken[pipe] = taken;
        if (sent > mine.shown) {
            store_release_sys(mine.arrived_there, one.stamp + sent);
            mine.shown = sent;
        }
        // half a ring at a time: the peer goes on with the other half
        const int ring = turn.in_rows[pipe];
        if (turn.receive[pipe] > ring && taken > mine.freed && 2 * (taken - mine.freed) >= ring) {
            store_release_sys(mine.freed_there, one.stamp + taken);
            mine.freed = taken;
        }
    }
    __syncthreads();
}

// Whether rows are missing or are not sent.
__device__ __forceinline__ bool unfinished(const Channel& one, const Turn& turn) {
    bool found = false;
    for (int pipe = 0; pipe < one.ranks; ++pipe) {
        found |= turn.taken[pipe] < turn.receive[pipe] || turn.sent[pipe] < turn.send[pipe];
    }
    return found;
}

// When the present wait began, and when the sticky error was looked at last.
struct Wait {
    word start, checked;
};

__device__ __forceinline__ Wait begin_wait() {
    const word now = clock_ns();
    return {now, now};
}

// After a turn in which nothing moved: whether to go on, the same in all threads. Barriers stand around it.
__device__ __forceinline__ int end_spin(const Channel& one, Turn& turn, Wait& wait) {
    if (threadIdx.x == 0) {
        const word now = clock_ns();
        const bool late = now - wait.start > one.of(C_LIMIT);
        int found = late ? LATE : GOING;
        // also at the end of the time: what the host knows names whom this block would only guess
        if (late || now - wait.checked > CHECK_NS) {
            wait.checked = now;
            // rule: a wait ends when the sticky error is set
            if (load_acquire_sys(global<const word>(one.of(C_ERROR))) != 0) {
                found = OVER;
            }
        }
        turn.found = found;
    }
    __syncthreads();
    const int found = turn.found;
    __syncthreads();
    return found;
}

// End a turn in which `moved` rows moved: DONE, GOING, or why there is no other turn. All copies of this thread are over.
// `left`: there is work of which no pipe knows.
__device__ __forceinline__ int end_turn(
    const Channel& one, Turn& turn, Pipe& mine, int sent, int taken, int moved, bool left, Wait& wait) {
    __syncthreads();
    advance(one, turn, mine, sent, taken);
    if (!unfinished(one, turn) && !left) {
        return DONE;
    }
    if (moved != 0) {
        wait = begin_wait();
        return GOING;
    }
    return end_spin(one, turn, wait);
}

// Note peers that are missing: whose rows have not come, else who have not read those that they have, else all.
__device__ __forceinline__ void blame(const Channel& one, Turn& turn, const Pipe& mine, bool combines) {
    const int pipe = threadIdx.x;
    bool any_late = false, any_stuck = false;
    for (int peer = 0; peer < one.ranks; ++peer) {
        any_late |= peer != one.me && turn.arrived[peer] < turn.receive[peer];
        any_stuck |= peer != one.me && turn.sent[peer] < turn.send[peer] && turn.sent[peer] >= turn.limit[peer];
    }
    if (mine.live && (pipe != one.me || !(any_late || any_stuck))) {
        const bool stuck = turn.sent[pipe] < turn.send[pipe] && turn.sent[pipe] >= turn.limit[pipe];
        if (any_late ? turn.arrived[pipe] < turn.receive[pipe] : !any_stuck) {
            note_wrong(turn, pipe, rows_stream(one, combines), turn.arrived[pipe], turn.receive[pipe]);
        } else if (!any_late && stuck) {
            note_wrong(turn, pipe, rows_stream(one, !combines), turn.limit[pipe], turn.sent[pipe] + 1);
        }
    }
    __syncthreads();
}

// By one thread. The first of this rank to fail reports; code 0: released by a failure that the host knows already.
__device__ __forceinline__ void fail(const Channel& one, word code, word peer, word stream, word got, word want) {
    if (exchange_gpu(global<word>(one.of(C_VERDICT)), 1) == 0 && code != 0) {
        const word report = one.of(C_REPORT);
        poke(report + ERROR_PEER, peer), poke(report + ERROR_STREAM, stream);
        poke(report + ERROR_ARRIVED, got), poke(report + ERROR_EXPECTED, want);
        store_release_sys(global<word>(report + ERROR_CODE), code);
    }
}

// After the last turn: fail, unless all is right.
__device__ __forceinline__ void end_turns(
    const Channel& one, Turn& turn, const Pipe& mine, int found, bool combines) {
    if (found == LATE) {
        blame(one, turn, mine, combines);
    }
    if (threadIdx.x == 0) {
        int pipe = one.ranks;
        for (int peer = one.ranks - 1; peer >= 0; --peer) {
            pipe = turn.wrong[peer] != 0 ? peer : pipe;
        }
        for (int warp = 0; warp < WARPS; ++warp) {
            // of what was taken out last nobody has looked what it claims
            if (turn.bad[warp] != 0 && turn.bad[warp] - 1 < pipe) {
                pipe = turn.bad[warp] - 1;
                note_wrong(turn, pipe, rows_stream(one, combines), 0, 0);
            }
        }
        if (found == OVER) {
            fail(one, 0, NOBODY, NOBODY, 0, 0);
        } else if (pipe < one.ranks) {
            const word code = found == LATE ? FAILURE_PEER_TIMEOUT : FAILURE_PROTOCOL;
            fail(one, code, pipe, turn.stream[pipe], turn.got[pipe], turn.want[pipe]);
        }
    }
}

// Tokens of the channel: each has as many consecutive ones, the last fewer.
struct Tokens {
    word next, end;
};

__device__ __forceinline__ Tokens tokens_of(const Channel& one, word tokens) {
    const word each = (tokens + one.channels - 1) / one.channels, begin = one.index * each;
    return {begin < tokens ? begin : tokens, begin + each < tokens ? begin + each : tokens};
}

// Whether the launch before has opened this operation; where it has not it has closed it as well.
__device__ __forceinline__ bool is_open(const Channel& one) {
    return peek(one.state + W_OPENED) == peek(one.state + W_NUMBER) + 1;
}

// Whether a block of this rank has failed, the same in all threads. Barriers stand around it.
__device__ __forceinline__ bool has_failed(const Channel& one, Turn& turn) {
    __syncthreads();
    if (threadIdx.x == 0) {
        turn.found = load_acquire_gpu(global<const word>(one.of(C_VERDICT))) != 0 ? OVER : GOING;
    }
    __syncthreads();
    const bool failed = turn.found == OVER;
    __syncthreads();
    return failed;
}

// Count this block as ended, of an operation that was opened; the last one closes it.
__device__ __forceinline__ void end_operation(const Channel& one) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (add_gpu(global<word>(one.state + W_ENDED), 1) + 1 == one.channels) {
            poke(one.state + W_ENDED, 0);
            poke(one.state + W_NUMBER, peek(one.state + W_NUMBER) + 1);
        }
    }
}
