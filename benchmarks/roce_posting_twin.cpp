// What posting a list of writes costs in C++: the same checks, credits and chain as the compiled path of roce, over the
// C structs of verbs as their header declares them (layouts repeated here, so that no header is needed).
#include <cstdint>

namespace {

struct Sge {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
};

struct SendRequest {
    uint64_t wr_id;
    SendRequest* next;
    Sge* sg_list;
    int32_t num_sge;
    uint32_t opcode;
    uint32_t send_flags;
    uint32_t imm_data;
    uint64_t remote_addr;
    uint32_t rkey;
    uint8_t rest[76];
};
static_assert(sizeof(SendRequest) == 128, "as in verbs.h");

struct Slot {
    SendRequest request;
    Sge sge;
};

struct Link {
    uint64_t posted, retired, signaled, immediates, allowed;
    uint64_t tickets[512];
    SendRequest *head, *tail;
};

Slot pool[256];
Link link;

using PostSend = int64_t (*)(int64_t, int64_t, int64_t);

}  // namespace

// Post `count` writes of `nbytes` bytes in chains of `batch`; every chain's last asks for a completion.
extern "C" void post_list(int64_t count, int64_t batch, int64_t nbytes, int64_t window, int64_t window_bytes,
                          int64_t target, int64_t lkey, int64_t rkey, int64_t qp, PostSend post_send, int64_t bad) {
    int used = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t offset = (i * nbytes) % (window_bytes - nbytes + 1) & ~int64_t{15};
        if (nbytes < 0 || offset > window_bytes - nbytes) return;
        if (link.posted - link.retired >= 512 - 8 || link.immediates >= link.allowed) {
            link.retired = link.posted;
            link.allowed = link.immediates + 1024;
        }
        ++link.immediates;
        Slot& slot = pool[used++];
        SendRequest& request = slot.request;
        const uint64_t number = link.posted++;
        request.wr_id = number & 0xFFFFFFFF;
        request.next = nullptr;
        request.sg_list = &slot.sge;
        request.num_sge = nbytes > 0;
        request.opcode = 1;
        request.send_flags = 0;
        if (number + 1 - link.signaled >= 64) {
            request.send_flags = 2;
            link.signaled = number + 1;
        }
        request.imm_data = __builtin_bswap32(static_cast<uint32_t>(i & 2047));
        request.remote_addr = target + offset;
        request.rkey = rkey;
        slot.sge = {static_cast<uint64_t>(window + offset), static_cast<uint32_t>(nbytes), static_cast<uint32_t>(lkey)};
        link.tickets[number % 512] = i + 1;
        if (link.tail != nullptr)
            link.tail->next = &request;
        else
            link.head = &request;
        link.tail = &request;
        if ((i + 1) % batch == 0) {
            request.send_flags = 2;
            link.signaled = link.posted;
            post_send(qp, reinterpret_cast<int64_t>(link.head), bad);
            link.head = link.tail = nullptr;
            used = 0;
        }
    }
}
