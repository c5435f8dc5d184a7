// What benchmarks/nic_posting.py measures beside the Numba data path of efa: the same checks, slots and calls through
// the same ibv_qp_ex, as a proxy written in C++ would make them. Offsets are those of rdma-core's struct ibv_qp_ex.
#include <cstdint>

namespace {

struct qp_ex {
    uint8_t base[160];
    uint64_t comp_mask;
    uint64_t wr_id;
    uint32_t wr_flags;
    uint8_t between[48];
    void (*wr_rdma_write_imm)(qp_ex*, uint32_t, uint64_t, uint32_t);
    void (*skipped[4])();
    void (*wr_set_ud_addr)(qp_ex*, void*, uint32_t, uint32_t);
    void (*skipped2[3])();
    void (*wr_set_sge)(qp_ex*, uint32_t, uint64_t, uint32_t);
    void (*skipped3)();
    void (*wr_start)(qp_ex*);
    int (*wr_complete)(qp_ex*);
};
static_assert(__builtin_offsetof(qp_ex, wr_rdma_write_imm) == 232, "ABI");
static_assert(__builtin_offsetof(qp_ex, wr_set_ud_addr) == 272, "ABI");
static_assert(__builtin_offsetof(qp_ex, wr_set_sge) == 304, "ABI");
static_assert(__builtin_offsetof(qp_ex, wr_start) == 320, "ABI");

}  // namespace

extern "C" {

struct twin_peer {
    int64_t up, window, ah, qpn, qkey, rkey;
};

struct twin_slot {
    int64_t ticket, peer;
};

struct twin {
    qp_ex* qp;
    int64_t window, window_bytes, max_write, lkey, open, free;
    twin_peer* peers;
    twin_slot* slots;
    int64_t* free_slots;
};

struct twin_write {
    int64_t peer, stream, local, target, nbytes, imm, wr_id;
};

// A function of its own, as the proxy loop calls it through a pointer.
__attribute__((noinline)) int64_t twin_post(twin* t, const twin_write* w) {
    const twin_peer& peer = t->peers[w->peer];
    if (!peer.up) return -107;
    if (w->nbytes < 0 || w->nbytes > t->max_write || w->target < 0 || w->target > t->window_bytes - w->nbytes) return -22;
    const int64_t free = t->free - 1;
    if (free < 0) return 1;
    qp_ex* qp = t->qp;
    if (t->open == 0) qp->wr_start(qp);
    t->open++;
    t->free = free;
    const int64_t slot = t->free_slots[free];
    t->slots[slot] = {w->wr_id, w->peer};
    qp->wr_id = slot + 1;
    qp->wr_flags = 2;
    qp->wr_rdma_write_imm(qp, peer.rkey, peer.window + w->target, __builtin_bswap32(static_cast<uint32_t>(w->imm)));
    qp->wr_set_ud_addr(qp, reinterpret_cast<void*>(peer.ah), peer.qpn, peer.qkey);
    qp->wr_set_sge(qp, t->lkey, w->local, w->nbytes);
    return 0;
}

// Post a list, ringing the doorbell after every `batch` writes. Returns 0 or the first status that is not.
int64_t twin_post_list(twin* t, const twin_write* list, int64_t count, int64_t batch) {
    for (int64_t i = 0; i < count; i++) {
        if (int64_t status = twin_post(t, list + i)) return status;
        if ((i + 1) % batch == 0 || i + 1 == count) {
            t->open = 0;
            if (int status = t->qp->wr_complete(t->qp)) return status;
        }
    }
    return 0;
}

// Give the slots of `count` completed writes back.
void twin_complete(twin* t, int64_t count) {
    for (int64_t i = 0; i < count; i++) t->free_slots[t->free++] = i;
}
}
