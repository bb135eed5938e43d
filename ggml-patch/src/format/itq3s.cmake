# Included by ggml/src/CMakeLists.txt: adds the format and the encoders to ggml-base.

target_sources(ggml-base PRIVATE
    ggml-itq3s.h itq3s-op.h itq3s-decode.c itq3s-exact.h itq3s-lanes.h itq3s-quantize.c
    itq3s-ldlq.h itq3s-ldlq.c itq3s-imatrix.c grid-ldlq.h grid-ldlq.c)

# The encoders match the numpy ones bit for bit: no fused multiply-add that the source does not ask for. The search
# holds 16 lanes in a register where there are registers that wide.
if (NOT MSVC)
    set(GGML_ITQ3S_FLAGS -ffp-contract=off -Wno-psabi)
    if (GGML_SYSTEM_ARCH STREQUAL "x86")
        list(APPEND GGML_ITQ3S_FLAGS -mprefer-vector-width=512)
    endif()
    set_source_files_properties(itq3s-decode.c itq3s-quantize.c itq3s-ldlq.c itq3s-imatrix.c grid-ldlq.c
        PROPERTIES COMPILE_OPTIONS "${GGML_ITQ3S_FLAGS}")
endif()
