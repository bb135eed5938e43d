# Read by llama.cpp's CMake at its project(): what parses options, templates and answers, or builds graphs, takes longest
# to compile, and no longer to run where it is optimised less.

# Compile a target with -O1, but for the sources whose names match.
function(itq3s_compile_quickly target pattern)
    if (TARGET ${target} AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND CMAKE_BUILD_TYPE STREQUAL "Release")
        get_target_property(folder ${target} SOURCE_DIR)
        get_target_property(sources ${target} SOURCES)
        list(TRANSFORM sources PREPEND "${folder}/" REGEX "^[^/]")
        list(FILTER sources INCLUDE REGEX "${pattern}")
        target_compile_options(${target} PRIVATE -O1)
        set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -O3)
    endif()
endfunction()

# What works for every token or every weight stays as it is.
cmake_language(DEFER CALL itq3s_compile_quickly llama
    "/(llama-(batch|context|graph|kv-cache|memory-recurrent|quant|sampler|vocab)|unicode)[.]cpp$")
cmake_language(DEFER CALL itq3s_compile_quickly llama-common
    "/(common|imatrix-loader|log|ngram-[^/]*|reasoning-budget|sampling|speculative|trie|unicode)[.]cpp$")
