#pragma once

// What code needs whose arithmetic is fixed to the bit (private to ggml-base).

#ifdef __FAST_MATH__
#    error "The encoders fix the order of their floating-point operations; build them without -ffast-math"
#endif

// ggml-base is compiled for the lowest processor of its architecture; let the loader choose better. Features, not
// architecture levels: compilers before GCC 12 cannot dispatch on those.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#    if __has_attribute(target_clones)
#        define ITQ_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#    endif
#endif
#ifndef ITQ_CLONES
#    define ITQ_CLONES
#endif
