/* How libraries that were not linked against the driver find its functions, and what becomes of those that the stub has
 * not. */
#define _GNU_SOURCE
#include "stub.h"

#include <dlfcn.h>
#include <stdio.h>

/* Functions that are not here: each name has an own answer, which says the name. */
#define MOST_UNKNOWN 1024
static char *unknown[MOST_UNKNOWN];

static CUresult refuse(int which) { return stub_unknown("%s", unknown[which]); }

#define ONE(n) static CUresult refuse_##n(void) { return refuse(0x##n); }
#define NAME(n) refuse_##n,
#define TO_16(what, n)                                                                                                 \
    what(n##0) what(n##1) what(n##2) what(n##3) what(n##4) what(n##5) what(n##6) what(n##7) what(n##8) what(n##9)      \
    what(n##a) what(n##b) what(n##c) what(n##d) what(n##e) what(n##f)
#define TO_256(what, n)                                                                                                \
    TO_16(what, n##0) TO_16(what, n##1) TO_16(what, n##2) TO_16(what, n##3) TO_16(what, n##4) TO_16(what, n##5)        \
    TO_16(what, n##6) TO_16(what, n##7) TO_16(what, n##8) TO_16(what, n##9) TO_16(what, n##a) TO_16(what, n##b)        \
    TO_16(what, n##c) TO_16(what, n##d) TO_16(what, n##e) TO_16(what, n##f)
#define TO_1024(what) TO_256(what, 0) TO_256(what, 1) TO_256(what, 2) TO_256(what, 3)
TO_1024(ONE)
static CUresult (*const refusals[MOST_UNKNOWN])(void) = {TO_1024(NAME)};

static void *refusal_of(const char *name) {
    int which = 0;
    while (which < MOST_UNKNOWN - 1 && unknown[which] && strcmp(unknown[which], name)) which++;
    if (!unknown[which]) unknown[which] = strdup(name);
    return (void *)refusals[which];
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    (void)flags;
    (void)version;
    static void *self;
    if (!self) {
        Dl_info info;
        if (!dladdr((void *)cuGetProcAddress_v2, &info)) abort();
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    char name[128];
    *function = NULL;
    /* the newest version that is here: the stub's are those that callers of today get */
    for (const char *const *suffix = (const char *const[]){"_v3", "_v2", "", NULL}; *suffix && !*function; suffix++) {
        snprintf(name, sizeof name, "%s%s", symbol, *suffix);
        *function = dlsym(self, name);
    }
    if (!*function) *function = refusal_of(symbol);
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

/* What CUDA's runtime library asks for first, and goes no further without: tables of functions that have no names. Its
 * calls end with CUDA_ERROR_NOT_SUPPORTED, told before anything is asked of the device. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    (void)id;
    *table = NULL;
    return stub_unknown("cuGetExportTable");
}

/* Linked against by Triton, for what no kernel here uses. */
#define LINKED(name, ...) CUresult name(__VA_ARGS__) { return stub_unknown(#name); }
#pragma GCC diagnostic ignored "-Wunused-parameter"
LINKED(cuCtxGetLimit, size_t *value, CUlimit limit)
LINKED(cuCtxSetLimit, CUlimit limit, size_t value)
LINKED(cuPointerGetAttribute, void *value, CUpointer_attribute attribute, CUdeviceptr address)
