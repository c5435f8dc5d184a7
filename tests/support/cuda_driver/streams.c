/* Streams, events and captures. Nothing runs, so everything asked for is over. */
#include "stub.h"

struct stream {
    struct object head;
    unsigned long long capture;
};

static unsigned long long captures;
static int capturing;

int stub_capturing(void) { return capturing; }

/* 0, 1 and 2 are the default ones. */
int stub_is_stream(CUstream stream) { return (uintptr_t)stream <= 2 || stub_find(stream, STREAM); }

/* Recorded: flags, priority. */
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    BEGIN(" %u %d", flags, priority);
    *stream = stub_make(STREAM, sizeof(struct stream));
    return CUDA_SUCCESS;
}

/* Recorded: stream, event, flags. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    BEGIN(" %p %p %u", (void *)stream, (void *)event, flags);
    NEED(stub_is_stream(stream) && stub_find(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

/* Recorded: stream, mode. Whatever the stream waits for is not followed: other streams capture nothing. */
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    BEGIN(" %p %d", (void *)stream, (int)mode);
    struct stream *found = stub_find(stream, STREAM);
    NEED(found, CUDA_ERROR_INVALID_HANDLE);
    found->capture = ++captures;
    capturing = 1;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    BEGIN(" %p", (void *)stream);
    struct stream *found = stub_find(stream, STREAM);
    NEED(found && found->capture, CUDA_ERROR_INVALID_HANDLE);
    found->capture = 0;
    capturing = 0;
    *graph = NULL;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    BEGIN(" %p", (void *)stream);
    NEED(stub_is_stream(stream), CUDA_ERROR_INVALID_HANDLE);
    struct stream *found = stub_find(stream, STREAM);
    *status = found && found->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

/* Recorded: stream. */
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph,
                                   const CUgraphNode **dependencies, size_t *count) {
    BEGIN(" %p", (void *)stream);
    struct stream *found = stub_find(stream, STREAM);
    NEED(found && !graph && !dependencies && !count, CUDA_ERROR_INVALID_VALUE);
    *status = found->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    *number = found->capture;
    return CUDA_SUCCESS;
}

/* Recorded: flags. */
CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    BEGIN(" %u", flags);
    *event = stub_make(EVENT, sizeof(struct object));
    return CUDA_SUCCESS;
}

/* Recorded: event, stream. */
CUresult cuEventRecord(CUevent event, CUstream stream) {
    BEGIN(" %p %p", (void *)event, (void *)stream);
    NEED(stub_is_stream(stream) && stub_find(event, EVENT), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    BEGIN(" %p", (void *)event);
    struct object *found = stub_find(event, EVENT);
    NEED(found, CUDA_ERROR_INVALID_HANDLE);
    found->alive = 0;
    return CUDA_SUCCESS;
}
