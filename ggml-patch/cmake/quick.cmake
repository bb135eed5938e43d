# Read by llama.cpp's CMake at its project(): what parses options, templates and answers takes longest to compile, a third
# of all that `make demo` compiles, and no longer to run where it is optimised less.

function(itq3s_compile_quickly)
    if (TARGET llama-common AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND CMAKE_BUILD_TYPE STREQUAL "Release")
        get_target_property(folder llama-common SOURCE_DIR)
        get_target_property(sources llama-common SOURCES)
        list(FILTER sources INCLUDE REGEX
            "(^|/)((arg|chat[^/]*|debug|download|hf-cache|json[^/]*|peg-parser|preset)|(jinja|parsers)/[^/]*)[.]cpp$")
        list(TRANSFORM sources PREPEND "${folder}/" REGEX "^[^/]")
        set_source_files_properties(${sources} TARGET_DIRECTORY llama-common PROPERTIES COMPILE_OPTIONS -O1)
    endif()
endfunction()

cmake_language(DEFER CALL itq3s_compile_quickly)
