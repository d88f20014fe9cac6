/* Included before llama.cpp's AMX kernels. Without it, code from older GCCs dies of a general protection fault there.
 *
 * `ldtilecfg` reads 64 bytes. In GCC before 11.5, 12.4, 13.3 and 14 its intrinsic tells the optimiser of only 8 of them
 * (GCC bug 114098). llama.cpp's tile configuration is a local variable, so its other bytes are never written. The
 * processor then refuses the random bytes that lie there.
 *
 * Debian 12 and Ubuntu 22.04 have such compilers. llama.cpp uses its AMX kernels on every processor with AMX (Xeon from
 * Sapphire Rapids on).
 */
#if defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const unsigned char (*)[64])(config)))
#endif
