// The calibrated encoders for processors with AVX-512.

#include "itq-exact.h"

#ifdef ITQ_X86_VARIANTS
#    ifdef __clang__
#        pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#    else
#        pragma GCC target("avx512f")
#    endif
#    undef ITQ_CLONES
#    define ITQ_CLONES
#    define ITQ_LANES         16
#    define ITQ_VARIANT(name) name##_avx512
#    include "grid-ldlq-feed.h"
#    include "itq-ldlq-search.h"
#    ifdef __clang__
#        pragma clang attribute pop
#    endif
#endif
