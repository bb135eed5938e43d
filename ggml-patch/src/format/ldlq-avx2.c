// The calibrated encoders for processors with AVX2.

#include "itq-exact.h"

#ifdef ITQ_X86_VARIANTS
#    ifdef __clang__
#        pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#    else
#        pragma GCC target("avx2")
#    endif
#    undef ITQ_CLONES
#    define ITQ_CLONES
#    define ITQ_LANES         8
#    define ITQ_VARIANT(name) name##_avx2
#    include "grid-ldlq-feed.h"
#    include "itq-ldlq-search.h"
#    ifdef __clang__
#        pragma clang attribute pop
#    endif
#endif
