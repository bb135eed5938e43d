# Included by ggml_add_cpu_backend_variant_impl: adds the kernels of ITQ3_S to a variant of the CPU backend, the
# portable ones and those in arch/<architecture>/.

file(GLOB GGML_ITQ3S_SOURCES CONFIGURE_DEPENDS
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml-cpu/itq3s/*.h
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml-cpu/itq3s/*.c
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml-cpu/itq3s/*.cpp)
if (GGML_SYSTEM_ARCH STREQUAL "x86")
    set(GGML_ITQ3S_ARCH x86)
elseif (GGML_SYSTEM_ARCH STREQUAL "ARM")
    set(GGML_ITQ3S_ARCH arm)
else()
    set(GGML_ITQ3S_ARCH none)
endif()
file(GLOB GGML_ITQ3S_ARCH_SOURCES CONFIGURE_DEPENDS
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml-cpu/itq3s/arch/${GGML_ITQ3S_ARCH}/*.c
    ${CMAKE_CURRENT_SOURCE_DIR}/ggml-cpu/itq3s/arch/${GGML_ITQ3S_ARCH}/*.cpp)
list(APPEND GGML_CPU_SOURCES ${GGML_ITQ3S_SOURCES} ${GGML_ITQ3S_ARCH_SOURCES})
