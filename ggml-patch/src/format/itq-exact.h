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

// Code for vectors of one length cannot be cloned: it is written as a function for each kind of processor, of which this
// is the best that runs here.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#    define ITQ_X86_VARIANTS
#    define ITQ_BEST_VARIANT(name)                         \
        (__builtin_cpu_supports("avx512f") ? name##_avx512 \
         : __builtin_cpu_supports("avx2")  ? name##_avx2   \
                                           : name##_generic)
#else
#    define ITQ_BEST_VARIANT(name) name##_generic
#endif
