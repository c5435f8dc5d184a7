/* A stub of the CUDA driver (libcuda.so.1): one GPU of sm_90 that executes nothing.
 *
 * What the host side asks of the driver is checked as the driver checks it (handles, limits of a launch, captures) and
 * recorded, one line a call: the function's name, then its arguments as described at each function. Device memory is
 * memory of the host. A function that is not here answers CUDA_ERROR_NOT_SUPPORTED, and is recorded as `unknown NAME`;
 * one that is linked against and missing does not load at all.
 *
 * The process that has loaded it reads and steers it through the functions whose names begin with `stub`.
 */
#include "stub.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#define DRIVER_VERSION 13050
/* Bytes of a line of the record. */
#define LONGEST 8192
/* The context of the only device. */
#define PRIMARY ((CUcontext)0x90)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *record_text;
static size_t record_bytes, record_room;
static int recording = 1, initialised;
static char fault_name[64];
static CUresult fault_code, sticky_code;
static struct object *objects[1 << 20];
static size_t object_count;
__thread CUcontext stub_context;

/* -- the record ---------------------------------------------------------------------------------------------------- */

/* The caller holds the lock. */
static void append(const char *format, va_list arguments) {
    if (record_room - record_bytes < LONGEST) {
        record_room = record_room ? 2 * record_room : 1 << 20;
        record_text = realloc(record_text, record_room);
        if (!record_text) abort();
    }
    int wanted = vsnprintf(record_text + record_bytes, LONGEST, format, arguments);
    if (wanted >= LONGEST) abort();
    record_bytes += (size_t)wanted;
}

static void append_plain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    append(format, arguments);
    va_end(arguments);
}

CUresult stub_begin(const char *name, const char *format, ...) {
    pthread_mutex_lock(&lock);
    CUresult result = initialised ? sticky_code : CUDA_ERROR_NOT_INITIALIZED;
    if (!result && !strcmp(name, fault_name)) {
        result = fault_code;
        /* a kernel has faulted, and the context is lost: every later call says so */
        if (result == CUDA_ERROR_ILLEGAL_ADDRESS || result == CUDA_ERROR_LAUNCH_FAILED) sticky_code = result;
    }
    if (recording) {
        append_plain("%s", name);
        va_list arguments;
        va_start(arguments, format);
        append(format, arguments);
        va_end(arguments);
        append_plain("\n");
    }
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult stub_unknown(const char *format, ...) {
    pthread_mutex_lock(&lock);
    append_plain("unknown ");
    va_list arguments;
    va_start(arguments, format);
    append(format, arguments);
    va_end(arguments);
    append_plain("\n");
    pthread_mutex_unlock(&lock);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* The record so far; valid until the next call of the driver. */
const char *stubRecord(void) { return record_bytes ? record_text : ""; }

void stubForget(void) { record_bytes = 0; }

void stubRecording(int on) { recording = on; }

int stub_records(void) { return recording; }

/* Calls of `name` end with `code` from now on; "" makes everything whole again, a lost context as well. */
void stubFault(const char *name, int code) {
    sticky_code = CUDA_SUCCESS;
    snprintf(fault_name, sizeof fault_name, "%s", name);
    fault_code = (CUresult)code;
}

/* -- handles ------------------------------------------------------------------------------------------------------- */

/* A handle is the object's place in the table and its kind, so that any number may be asked for. */
void *stub_make(enum kind kind, size_t bytes) {
    struct object *made = calloc(1, bytes);
    pthread_mutex_lock(&lock);
    if (!made || object_count == sizeof objects / sizeof *objects) abort();
    *made = (struct object){kind, 1};
    objects[object_count++] = made;
    uintptr_t handle = object_count << 4 | kind;
    pthread_mutex_unlock(&lock);
    return (void *)handle;
}

void *stub_find(const void *handle, enum kind kind) {
    size_t place = (uintptr_t)handle >> 4;
    if (((uintptr_t)handle & 15) != kind || !place || place > object_count) return NULL;
    return objects[place - 1]->alive ? objects[place - 1] : NULL;
}

/* -- errors -------------------------------------------------------------------------------------------------------- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
};

CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = NULL;
    for (size_t one = 0; one < sizeof errors / sizeof *errors; one++)
        if (errors[one].code == code) *text = errors[one].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **text) {
    *text = NULL;
    for (size_t one = 0; one < sizeof errors / sizeof *errors; one++)
        if (errors[one].code == code) *text = errors[one].name;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* -- device and context -------------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags) {
    initialised = 1;
    BEGIN(" %u", flags);
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    BEGIN(" %d", ordinal);
    NEED(ordinal == 0, CUDA_ERROR_INVALID_DEVICE);
    *device = 0;
    return CUDA_SUCCESS;
}

/* What an H100 SXM answers. */
static const int attributes[][2] = {
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
};

/* Recorded: attribute, device. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    BEGIN(" %d %d", (int)attribute, device);
    for (size_t one = 0; one < sizeof attributes / sizeof *attributes; one++)
        if (attributes[one][0] == (int)attribute) {
            *value = attributes[one][1];
            return CUDA_SUCCESS;
        }
    return stub_unknown("cuDeviceGetAttribute(%d)", (int)attribute);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    BEGIN(" %d", device);
    *context = PRIMARY;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    BEGIN("%s", "");
    *context = stub_context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    BEGIN(" %p", (void *)context);
    NEED(!context || context == PRIMARY, CUDA_ERROR_INVALID_CONTEXT);
    stub_context = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    BEGIN("%s", "");
    NEED(stub_context, CUDA_ERROR_INVALID_CONTEXT);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    BEGIN("%s", "");
    return CUDA_SUCCESS;
}
