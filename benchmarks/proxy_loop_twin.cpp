// The proxy loop written in C++, over the same memory and the same stub transport: what a compiler makes of the same
// work. It follows proxy/{loop,ring,flow,arrivals,sequence}.py for everything that happens in order of business. What
// a measurement must not meet (queues, refused posts, faults) sets the global `departed` instead, and the benchmark
// then fails.
//
// Every name in capitals is a number of the Python sources, given with -D by proxy_loop.py, so that no layout is
// written down twice.
#include <algorithm>
#include <cstdint>
#include <ctime>

using word = int64_t;

static word departed = 0;

static inline word peek(word address) { return *reinterpret_cast<const word *>(address); }
static inline void poke(word address, word value) { *reinterpret_cast<word *>(address) = value; }
static inline word load(word address) { return __atomic_load_n(reinterpret_cast<word *>(address), __ATOMIC_ACQUIRE); }
static inline void store(word address, word value) {
    __atomic_store_n(reinterpret_cast<word *>(address), value, __ATOMIC_RELEASE);
}

using Post = word (*)(word, word, word, word, word, word, word, word);
using Poll = word (*)(word, word, word);
using Flush = word (*)(word);

static inline word now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

// --- sequence.py ---------------------------------------------------------------------------------------------------

static inline word pair_address(word window, word sequence) {
    return window + PAIRS + ((sequence & (SEQUENCE_WINDOW - 1)) >> 5) * 8;
}

__attribute__((noinline)) static void close_gap(word window, word published, word prefix, word last) {
    word messages = peek(window + MESSAGES) + last;
    word held = peek(window + HELD);
    ++prefix;
    while (held) {
        word address = pair_address(window, prefix), shift = 2 * (prefix & 31), bits = peek(address);
        word pair = (bits >> shift) & 3;
        if (!pair) break;
        poke(address, bits & ~(word(3) << shift));
        messages += pair >> 1;
        ++prefix;
        --held;
    }
    poke(window + PREFIX, prefix);
    poke(window + HELD, held);
    poke(window + MESSAGES, messages);
    store(published, messages);
}

static inline word note(word window, word published, word sequence, word last) {
    word prefix = peek(window + PREFIX), ahead = (sequence - prefix) & SEQUENCE_MASK;
    if (!ahead) {
        if (!peek(window + HELD)) {
            poke(window + PREFIX, prefix + 1);
            if (last) {
                word messages = peek(window + MESSAGES) + 1;
                poke(window + MESSAGES, messages);
                store(published, messages);
            }
        } else {
            close_gap(window, published, prefix, last);
        }
        return IN_ORDER;
    }
    if (ahead >= SEQUENCE_WINDOW) return REPEATED;
    word address = pair_address(window, sequence), shift = 2 * (sequence & 31), bits = peek(address);
    if ((bits >> shift) & 1) return REPEATED;
    poke(address, bits | (1 | last << 1) << shift);
    poke(window + HELD, peek(window + HELD) + 1);
    return HELD_BACK;
}

// --- flow.py -------------------------------------------------------------------------------------------------------

static inline bool admitted(word state, word entry, word record, word nbytes) {
    if (peek(entry + PEER_BUSY) == peek(state + STAMP)) return false;
    word covered = std::min(peek(record + CREDITED), peek(record + DONE + PREFIX));
    if (peek(record + NEXT) - covered >= SEQUENCE_WINDOW) return false;
    word peer_load = peek(entry + PEER_LOAD);
    if (!peer_load) return true;
    word all = peek(state + LOAD);
    return all >> LOAD_SHIFT < peek(state + WRITE_CAP) && (peer_load >> LOAD_SHIFT) * 2 < peek(state + WRITE_CAP) &&
           (all & LOAD_BYTES) + nbytes <= peek(state + BYTE_CAP) &&
           (peer_load & LOAD_BYTES) + nbytes <= peek(state + PEER_BYTE_CAP);
}

static inline bool post(word state, word entry, word record, word peer, word stream, word local, word target,
                        word nbytes, word last) {
    word endpoint = peek(entry + PEER_ENDPOINT), sequence = peek(record + NEXT), low = sequence & SEQUENCE_MASK;
    word ticket = nbytes >> UNIT_SHIFT << TICKET_LENGTH | peer << TICKET_PEER | stream << TICKET_STREAM |
                  last << TICKET_LAST | low;
    word imm = peek(state + RANK) << IMM_SOURCE | stream << IMM_STREAM | last << IMM_LAST | low;
    auto function = reinterpret_cast<Post>(peek(endpoint + EP_POST));
    if (function(peek(endpoint + EP_CONTEXT), peer, stream, local, target, nbytes, imm, ticket) != ACCEPTED) {
        departed = 1;
        return false;
    }
    poke(endpoint + EP_DIRTY, 1);
    poke(record + NEXT, sequence + 1);
    if (stream >= CREDIT) {
        poke(entry + PEER_CREDITS, peek(entry + PEER_CREDITS) + 1);
        poke(state + CREDITS, peek(state + CREDITS) + 1);
        return true;
    }
    word load = LOAD_WRITE + nbytes;
    poke(entry + PEER_LOAD, peek(entry + PEER_LOAD) + load);
    poke(state + LOAD, peek(state + LOAD) + load);
    word counters = peek(state + COUNTERS);
    poke(counters + C_BYTES_SENT, peek(counters + C_BYTES_SENT) + nbytes);
    if (!peek(state + PROBE) && !(peek(state + STAMP) & 7)) {
        poke(state + PROBE, ticket + 1);
        poke(state + PROBE_AT, now());
    }
    return true;
}

__attribute__((noinline)) static void measure(word state, word stream) {
    poke(state + PROBE, 0);
    word latency = now() - peek(state + PROBE_AT), bucket = 0;
    while (latency > 1 && bucket < LATENCY_BUCKETS - 1) {
        latency >>= 1;
        ++bucket;
    }
    word address = peek(state + LATENCY) + (stream * LATENCY_BUCKETS + bucket) * 8;
    poke(address, peek(address) + 1);
}

static inline void complete(word state, word ticket) {
    word peer = (ticket >> TICKET_PEER) & TICKET_PEER_MASK, stream = (ticket >> TICKET_STREAM) & TICKET_STREAM_MASK;
    word entry = peek(state + PEERS) + peer * PEER_ENTRY, index = peer * STREAMS + stream;
    word record = peek(state + SEND) + index * SEND_ENTRY;
    if (peer >= peek(state + RANKS)) {
        departed = 2;
        return;
    }
    if (peek(entry + PEER_STATE) != UP) return;
    word done = peek(record + DONE + PREFIX);
    if (((ticket - done) & SEQUENCE_MASK) >= peek(record + NEXT) - done) {
        departed = 3;
        return;
    }
    word published = peek(state + COMPLETED) + index * 8;
    if (note(record + DONE, published, ticket, (ticket >> TICKET_LAST) & 1) == REPEATED) {
        departed = 4;
        return;
    }
    if (stream >= CREDIT) {
        poke(entry + PEER_CREDITS, peek(entry + PEER_CREDITS) - 1);
        poke(state + CREDITS, peek(state + CREDITS) - 1);
        return;
    }
    word load = LOAD_WRITE + (((ticket >> TICKET_LENGTH) & TICKET_LENGTH_MASK) << UNIT_SHIFT);
    poke(entry + PEER_LOAD, peek(entry + PEER_LOAD) - load);
    poke(state + LOAD, peek(state + LOAD) - load);
    if (ticket + 1 == peek(state + PROBE)) measure(state, stream);
}

// --- arrivals.py ---------------------------------------------------------------------------------------------------

__attribute__((noinline)) static void owe(word state, word record, word index) {
    poke(record + DUE, 1);
    poke(record + DUE_NEXT, 0);
    word tail = peek(state + DUE_TAIL);
    if (tail)
        poke(peek(state + RECEIVE) + (tail - 1) * RECEIVE_ENTRY + DUE_NEXT, index + 1);
    else
        poke(state + DUE_HEAD, index + 1);
    poke(state + DUE_TAIL, index + 1);
}

static inline void arrive(word state, word proven, word imm, word nbytes) {
    word source = (imm >> IMM_SOURCE) & IMM_SOURCE_MASK, stream = (imm >> IMM_STREAM) & IMM_STREAM_MASK;
    if (imm >> 32 || source >= peek(state + RANKS) || source == peek(state + RANK) ||
        (proven >= 0 && proven != source)) {
        departed = 5;
        return;
    }
    if (peek(peek(state + PEERS) + source * PEER_ENTRY + PEER_STATE) != UP) return;
    if (!peek(peek(state + OWNED) + stream * 8)) {
        departed = 6;
        return;
    }
    word index = source * STREAMS + stream, record = peek(state + RECEIVE) + index * RECEIVE_ENTRY;
    word outcome = note(record + SEEN, peek(state + ARRIVED) + index * 8, imm, (imm >> IMM_LAST) & 1);
    word counters = peek(state + COUNTERS);
    if (outcome == REPEATED) {
        poke(counters + C_DUPLICATES, peek(counters + C_DUPLICATES) + 1);
        return;
    }
    if (outcome == HELD_BACK) poke(counters + C_HELD_BACK, peek(counters + C_HELD_BACK) + 1);
    word prefix = peek(record + SEEN + PREFIX);
    if (stream >= CREDIT) {
        word send = peek(state + SEND) + (index ^ CREDIT) * SEND_ENTRY, covered = prefix * CREDIT_WRITES;
        if (covered > peek(send + NEXT))
            departed = 7;
        else
            poke(send + CREDITED, covered);
        return;
    }
    poke(counters + C_BYTES_RECEIVED, peek(counters + C_BYTES_RECEIVED) + nbytes);
    if (prefix - peek(record + GRANTED) >= CREDIT_WRITES && !peek(record + DUE)) owe(state, record, index);
}

__attribute__((noinline)) static word grant_credits(word state) {
    word index = peek(state + DUE_HEAD) - 1, posted = 0, end = peek(state + DUE_TAIL) - 1;
    while (index >= 0) {
        word record = peek(state + RECEIVE) + index * RECEIVE_ENTRY, following = peek(record + DUE_NEXT) - 1;
        poke(state + DUE_HEAD, following + 1);
        if (following < 0) poke(state + DUE_TAIL, 0);
        poke(record + DUE, 0);
        word peer = index / STREAMS, entry = peek(state + PEERS) + peer * PEER_ENTRY;
        word stream = (index % STREAMS) | CREDIT, send = peek(state + SEND) + (index | CREDIT) * SEND_ENTRY;
        while (peek(entry + PEER_STATE) == UP && peek(record + SEEN + PREFIX) - peek(record + GRANTED) >= CREDIT_WRITES) {
            if (peek(entry + PEER_BUSY) == peek(state + STAMP) ||
                peek(send + NEXT) - peek(send + DONE + PREFIX) >= SEQUENCE_WINDOW) {
                owe(state, record, index);
                break;
            }
            if (!post(state, entry, send, peer, stream, peek(state + WINDOW), 0, 0, 1)) break;
            poke(record + GRANTED, peek(record + GRANTED) + CREDIT_WRITES);
            ++posted;
        }
        if (index == end) break;
        index = following;
    }
    return posted;
}

// --- ring.py -------------------------------------------------------------------------------------------------------

static inline word offset(word half) { return ((half >> OFFSET_SHIFT) & OFFSET_MASK) << UNIT_SHIFT; }

static inline bool acceptable(word state, word low, word high) {
    word peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK;
    word stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK;
    word nbytes = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT, limit = peek(state + WINDOW_BYTES) - nbytes;
    bool good = ((high >> COMMAND_KIND_SHIFT) & COMMAND_KIND_MASK) == KIND_WRITE && peer < peek(state + RANKS) &&
                peek(peek(state + PEERS) + peer * PEER_ENTRY + PEER_STATE) != ABSENT && stream < CREDIT &&
                peek(peek(state + OWNED) + stream * 8) && nbytes <= MAX_WRITE_BYTES && offset(low) <= limit &&
                offset(high) <= limit;
    if (!good) departed = 8;
    return good;
}

static inline bool begin(word state, word low, word high) {
    word peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK;
    word stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK, last = (high >> COMMAND_LAST_SHIFT) & 1;
    word nbytes = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT;
    word entry = peek(state + PEERS) + peer * PEER_ENTRY;
    word record = peek(state + SEND) + (peer * STREAMS + stream) * SEND_ENTRY;
    if (!peek(record + QUEUE_HEAD) && nbytes <= peek(state + QUANTUM) && peek(entry + PEER_STATE) == UP &&
        admitted(state, entry, record, nbytes) &&
        post(state, entry, record, peer, stream, peek(state + WINDOW) + offset(low), offset(high), nbytes, last)) {
        poke(record + ENQUEUED, peek(record + ENQUEUED) + last);
        return true;
    }
    departed = 9;
    return false;
}

static inline word take_commands(word state) {
    word counters = peek(state + COUNTERS), commands = peek(counters + C_COMMANDS), limit = BATCH;
    if (peek(state + DIE_AFTER)) departed = 10;
    word ring = peek(state + RING), mask = peek(state + RING_MASK), shift = peek(state + RING_SHIFT);
    word first = peek(state + TAIL), tail = first;
    while (tail - first < limit) {
        word slot = ring + RING_SLOTS + ((tail & mask) << 4), lap = ((tail >> shift) + 1) & 1;
        word low = load(slot), high = load(slot + 8);
        if ((low & 1) != lap || (high & 1) != lap) break;
        if (acceptable(state, low, high) && !begin(state, low, high)) break;
        ++tail;
    }
    if (tail != first) {
        poke(state + TAIL, tail);
        poke(counters + C_COMMANDS, commands + tail - first);
        store(ring + RING_TAIL, tail);
    }
    return tail - first;
}

// --- loop.py -------------------------------------------------------------------------------------------------------

static inline word step(word state) {
    if (load(state + STOP)) return -1;
    poke(state + STAMP, peek(state + STAMP) + 1);
    if (load(state + REQUESTS) != peek(state + REQUESTS_SEEN)) departed = 11;
    word first = peek(state + ENDPOINTS), count = peek(state + ENDPOINT_COUNT), events = peek(state + EVENTS), work = 0;
    for (word i = 0; i < count; ++i) {
        word endpoint = first + i * ENDPOINT_ENTRY;
        if (peek(endpoint + EP_BROKEN)) continue;
        word number = reinterpret_cast<Poll>(peek(endpoint + EP_POLL))(peek(endpoint + EP_CONTEXT), events, EVENT_LIMIT);
        for (word k = 0; k < number; ++k) {
            word event = events + k * EVENT_BYTES, kind = peek(event);
            if (kind == SENT)
                complete(state, peek(event + 8));
            else if (kind == ARRIVED_EVENT)
                arrive(state, peek(event + 16), peek(event + 8), peek(event + 24));
            else
                departed = 12;
        }
        work += number;
    }
    work += grant_credits(state);
    if (peek(state + READY_COUNT)) departed = 13;
    word taken = take_commands(state);
    for (word i = 0; i < count; ++i) {
        word endpoint = first + i * ENDPOINT_ENTRY;
        if (!peek(endpoint + EP_DIRTY)) continue;
        poke(endpoint + EP_DIRTY, 0);
        reinterpret_cast<Flush>(peek(endpoint + EP_FLUSH))(peek(endpoint + EP_CONTEXT));
    }
    word counters = peek(state + COUNTERS);
    poke(counters + C_ITERATIONS, peek(counters + C_ITERATIONS) + 1);
    return work + taken;
}

// Step until the ring is taken up to `head` and every post has completed. Returns `departed`.
extern "C" word until_taken(word state, word ring, word head, word stub) {
    while (!departed && (load(ring + RING_TAIL) < head || peek(stub + STUB_TAKEN) < peek(stub + STUB_COUNT))) step(state);
    return departed;
}

// Step until the stub has handed out its immediates. Returns `departed`.
extern "C" word until_fed(word state, word stub) {
    while (!departed && peek(stub + STUB_FEED) < peek(stub + STUB_FEED_END)) step(state);
    return departed;
}
