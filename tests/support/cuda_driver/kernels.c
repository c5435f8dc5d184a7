/* Modules, functions and launches. */
#include "stub.h"

#include <elf.h>
#include <stdio.h>

#define MOST_PARAMETERS 256
/* Limits of sm_90: bytes of shared memory of a block, threads of a block, registers of a multiprocessor. */
#define SHARED_WITHOUT_OPT_IN (48 << 10)
#define SHARED_WITH_OPT_IN (227 << 10)
#define MOST_THREADS 1024
#define REGISTERS 65536

struct module {
    struct object head;
    char *cubin;
};

struct function {
    struct object head;
    char name[256];
    int parameters, size[MOST_PARAMETERS], registers, shared_limit;
};

static const Elf64_Shdr *sections(const char *cubin) {
    return (const Elf64_Shdr *)(cubin + ((const Elf64_Ehdr *)cubin)->e_shoff);
}

/* The section `prefix``name` of a cubin, or NULL. */
static const Elf64_Shdr *section(const char *cubin, const char *prefix, const char *name) {
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)cubin;
    const Elf64_Shdr *all = sections(cubin);
    const char *names = cubin + all[head->e_shstrndx].sh_offset;
    for (int one = 0; one < head->e_shnum; one++) {
        const char *found = names + all[one].sh_name;
        if (!strncmp(found, prefix, strlen(prefix)) && !strcmp(found + strlen(prefix), name)) return &all[one];
    }
    return NULL;
}

/* Sizes of a kernel's parameters, as ptxas left them in the cubin: entries of (format, attribute, uint16 value); a
 * value of format 4 counts the bytes that follow. Attribute 0x17 (EIATTR_KPARAM_INFO): uint32 index, uint16 ordinal,
 * uint16 offset, and a word whose upper 14 bits are the size. */
static void read_parameters(struct function *function, const char *cubin, const Elf64_Shdr *info) {
    const uint8_t *at = (const uint8_t *)cubin + info->sh_offset, *end = at + info->sh_size;
    while (at + 4 <= end) {
        uint16_t bytes = at[0] == 4 ? *(const uint16_t *)(at + 2) : 0;
        if (at[0] == 4 && at[1] == 0x17) {
            int ordinal = *(const uint16_t *)(at + 8);
            if (ordinal >= MOST_PARAMETERS) abort();
            function->size[ordinal] = (int)(*(const uint32_t *)(at + 12) >> 18);
            if (function->parameters <= ordinal) function->parameters = ordinal + 1;
        }
        at += 4 + bytes;
    }
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    BEGIN("%s", "");
    NEED(stub_context, CUDA_ERROR_INVALID_CONTEXT);
    NEED(!stub_capturing(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    NEED(!memcmp(image, ELFMAG, SELFMAG), CUDA_ERROR_INVALID_IMAGE);
    const Elf64_Ehdr *head = image;
    const Elf64_Shdr *all = sections(image);
    size_t bytes = head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
    for (int one = 0; one < head->e_shnum; one++)
        if (all[one].sh_type != SHT_NOBITS && all[one].sh_offset + all[one].sh_size > bytes)
            bytes = all[one].sh_offset + all[one].sh_size;
    void *handle = stub_make(MODULE, sizeof(struct module));
    struct module *made = stub_find(handle, MODULE);
    /* the caller may free its own */
    made->cubin = malloc(bytes);
    if (!made->cubin) abort();
    memcpy(made->cubin, image, bytes);
    *module = handle;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    BEGIN("%s", "");
    struct module *found = stub_find(module, MODULE);
    NEED(found, CUDA_ERROR_INVALID_HANDLE);
    found->head.alive = 0;
    return CUDA_SUCCESS;
}

/* Recorded: the function's name. */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    BEGIN(" %s", name);
    struct module *from = stub_find(module, MODULE);
    NEED(from, CUDA_ERROR_INVALID_HANDLE);
    const Elf64_Shdr *code = section(from->cubin, ".text.", name), *info = section(from->cubin, ".nv.info.", name);
    NEED(code && info, CUDA_ERROR_NOT_FOUND);
    void *handle = stub_make(FUNCTION, sizeof(struct function));
    struct function *made = stub_find(handle, FUNCTION);
    snprintf(made->name, sizeof made->name, "%s", name);
    /* where ptxas leaves them */
    made->registers = (int)(code->sh_info >> 24);
    made->shared_limit = SHARED_WITHOUT_OPT_IN;
    read_parameters(made, from->cubin, info);
    *function = handle;
    return CUDA_SUCCESS;
}

/* Recorded: attribute. */
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    BEGIN(" %d", (int)attribute);
    struct function *found = stub_find(function, FUNCTION);
    NEED(found, CUDA_ERROR_INVALID_HANDLE);
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = found->registers; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = MOST_THREADS; return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = 0; return CUDA_SUCCESS;
    default: return stub_unknown("cuFuncGetAttribute(%d)", (int)attribute);
    }
}

/* Recorded: attribute, value. */
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    BEGIN(" %d %d", (int)attribute, value);
    struct function *found = stub_find(function, FUNCTION);
    NEED(found, CUDA_ERROR_INVALID_HANDLE);
    NEED(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_VALUE);
    NEED(value >= 0 && value <= SHARED_WITH_OPT_IN, CUDA_ERROR_INVALID_VALUE);
    found->shared_limit = value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    BEGIN(" %d", (int)config);
    NEED(stub_find(function, FUNCTION), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

/* Recorded: kernel, grid x y z, block x y z, bytes of shared memory, stream, and each parameter as SIZE:HEX, its bytes
 * in the order of memory. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    struct function *found = stub_find(function, FUNCTION);
    char text[4096];
    size_t used = 0;
    text[0] = 0;
    for (int one = 0; stub_records() && found && one < found->parameters; one++) {
        if (used + 8 + 2 * (size_t)found->size[one] >= sizeof text) abort();
        used += (size_t)sprintf(text + used, " %d:", found->size[one]);
        for (int byte = 0; byte < found->size[one]; byte++)
            used += (size_t)sprintf(text + used, "%02x", ((uint8_t *)parameters[one])[byte]);
    }
    BEGIN(" %s %u %u %u %u %u %u %u %p%s", found ? found->name : "?", config->gridDimX, config->gridDimY,
          config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ, config->sharedMemBytes,
          (void *)config->hStream, text);
    NEED(stub_context, CUDA_ERROR_INVALID_CONTEXT);
    NEED(found && stub_is_stream(config->hStream), CUDA_ERROR_INVALID_HANDLE);
    NEED(!extra && config->numAttrs == 0, CUDA_ERROR_NOT_SUPPORTED);
    uint64_t threads = (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ;
    NEED(config->gridDimX && config->gridDimY && config->gridDimZ && threads, CUDA_ERROR_INVALID_VALUE);
    NEED(config->gridDimX <= 0x7FFFFFFF && config->gridDimY <= 65535 && config->gridDimZ <= 65535,
         CUDA_ERROR_INVALID_VALUE);
    NEED(threads <= MOST_THREADS && (int)config->sharedMemBytes <= found->shared_limit, CUDA_ERROR_INVALID_VALUE);
    NEED(threads * (uint64_t)found->registers <= REGISTERS, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    return CUDA_SUCCESS;
}
