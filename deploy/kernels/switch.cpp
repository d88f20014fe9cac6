/* Whether this process uses the kernels in its llama.cpp, and their names. */
#include "relayline_hooks.h"

#include <cstdlib>
#include <strings.h>

bool relayline_kernels_on(void) {
    static const bool is_on = [] {
        const char * asked = std::getenv("RELAYLINE_KERNELS");
        return !asked || strcasecmp(asked, "off") != 0;
    }();
    return is_on;
}

const char * relayline_kernels(void) {
    return relayline_kernels_on() ? RELAYLINE_KERNELS_IN : ""; // kernels.cmake defines it
}
