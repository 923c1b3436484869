/* What this machine can do at most: bytes read as one stream, fused multiply-adds. For bench/limits.py. */
#include <stdint.h>

typedef float vf __attribute__((vector_size(32)));
typedef int64_t vi __attribute__((vector_size(32)));

/* Sum of `bytes` (a multiple of 128) at a 32-byte border, so that no load can be left out. */
int64_t read_stream(const char *at, int64_t bytes)
{
    vi a = {0}, b = {0}, c = {0}, d = {0};
    for (int64_t i = 0; i < bytes; i += 128) {
        a += *(const vi *)(at + i);
        b += *(const vi *)(at + i + 32);
        c += *(const vi *)(at + i + 64);
        d += *(const vi *)(at + i + 96);
    }
    const vi s = (a + b) + (c + d);
    return s[0] + s[1] + s[2] + s[3];
}

/* `rounds` times 12 chains of 8 multiply-adds each: 192 floating-point operations a round. */
float multiply_add(int64_t rounds, float x)
{
    vf acc[12];
    for (int k = 0; k < 12; k++) acc[k] = (vf){1, 2, 3, 4, 5, 6, 7, 8} * (float)(k + 1);
    const vf factor = (vf){0} + x;
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
        for (int k = 0; k < 12; k++) acc[k] = acc[k] * factor + factor;
    }
    float sum = 0;
    for (int k = 0; k < 12; k++) sum += acc[k][0] + acc[k][7];
    return sum;
}
