# Included by ggml/src/CMakeLists.txt: adds the format and the encoders to ggml-base.

target_sources(ggml-base PRIVATE
    ggml-itq-types.h ggml-itq.h itq-op.h itq-decode.c itq-exact.h itq-lanes.h itq-quantize.c
    itq-vectors.h itq-ldlq.h itq-ldlq-search.h itq-ldlq.c itq-imatrix.c
    grid-ldlq.h grid-ldlq-feed.h grid-ldlq.c ldlq-avx2.c ldlq-avx512.c)

# The encoders match the numpy ones bit for bit: no fused multiply-add that the source does not ask for. The search
# holds 16 lanes in a register where there are registers that wide.
if (NOT MSVC)
    set(GGML_ITQ3S_FLAGS -ffp-contract=off -Wno-psabi)
    if (GGML_SYSTEM_ARCH STREQUAL "x86")
        list(APPEND GGML_ITQ3S_FLAGS -mprefer-vector-width=512)
    endif()
    set_source_files_properties(itq-decode.c itq-quantize.c itq-ldlq.c itq-imatrix.c grid-ldlq.c ldlq-avx2.c ldlq-avx512.c
        PROPERTIES COMPILE_OPTIONS "${GGML_ITQ3S_FLAGS}")
endif()
