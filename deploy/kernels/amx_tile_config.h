/* Included ahead of llama.cpp's AMX kernels, for GCC: without it they die of a general protection fault.
 *
 * `ldtilecfg` reads 64 bytes. GCC before 11.5, 12.4, 13.3 and 14 has an intrinsic that tells the optimiser of 8 of them
 * (its bug 114098), so that the rest of llama.cpp's tile configuration, a local variable, is never written, and the
 * processor refuses what happens to lie there. Debian 12 and Ubuntu 22.04 have such compilers, and llama.cpp takes its
 * AMX kernels by itself on every processor that has them (Xeon from Sapphire Rapids on).
 */
#if defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const unsigned char (*)[64])(config)))
#endif
