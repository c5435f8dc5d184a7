// Sixteen bytes of values as float32, and back: rounded to nearest even.

#pragma once

constexpr int VALUES = DTYPE == DTYPE_F32 ? 4 : 8;

__device__ __forceinline__ float widened(unsigned bits) {
    if (DTYPE == DTYPE_BF16) {
        return __uint_as_float(bits << 16);
    }
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
}

__device__ __forceinline__ void widen(const uint4& from, float (&to)[VALUES]) {
    const unsigned words[4] = {from.x, from.y, from.z, from.w};
    for (int at = 0; at < 4; ++at) {
        if constexpr (DTYPE == DTYPE_F32) {
            to[at] = __uint_as_float(words[at]);
        } else {
            to[2 * at] = widened(words[at] & 0xFFFF);
            to[2 * at + 1] = widened(words[at] >> 16);
        }
    }
}

__device__ __forceinline__ uint4 narrow(const float (&from)[VALUES]) {
    unsigned words[4];
    for (int at = 0; at < 4; ++at) {
        if constexpr (DTYPE == DTYPE_F32) {
            words[at] = __float_as_uint(from[at]);
        } else if constexpr (DTYPE == DTYPE_BF16) {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[at]) : "f"(from[2 * at + 1]), "f"(from[2 * at]));
        } else {
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[at]) : "f"(from[2 * at + 1]), "f"(from[2 * at]));
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
