/* What the parts of the stub share: the record, faults, handles. See libcuda.c. */
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Record a call of `name` with its arguments, and say how it ends before it begins: CUDA_SUCCESS to go on. */
CUresult stub_begin(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Whether anything is recorded. */
int stub_records(void);
/* Record `unknown NAME`: the stub has not been taught what was asked. Returns CUDA_ERROR_NOT_SUPPORTED. */
CUresult stub_unknown(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define BEGIN(...)                                                                                                     \
    do {                                                                                                               \
        CUresult begun_ = stub_begin(__func__, __VA_ARGS__);                                                           \
        if (begun_) return begun_;                                                                                     \
    } while (0)
#define NEED(condition, code)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) return code;                                                                                 \
    } while (0)

enum kind { STREAM = 1, EVENT, MODULE, FUNCTION };

/* What a handle stands for begins with this. One that is given back stays, so that its use is noticed. */
struct object {
    enum kind kind;
    int alive;
};

/* A handle for a new object of `bytes`, zeroed but for its head. */
void *stub_make(enum kind kind, size_t bytes);
/* What `handle` stands for, NULL unless it is alive and of this kind. */
void *stub_find(const void *handle, enum kind kind);

/* The calling thread's context. */
extern __thread CUcontext stub_context;
/* A stream captures a graph. */
int stub_capturing(void);
/* A stream that was created and is not destroyed, or one of the default ones. */
int stub_is_stream(CUstream stream);
