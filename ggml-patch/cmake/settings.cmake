# Settings of the build, and where things are kept.

get_filename_component(ITQ3S_PATCH_DIR "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
get_filename_component(ITQ3S_REPOSITORY "${ITQ3S_PATCH_DIR}/.." ABSOLUTE)

# The value of setting `name`: a -D option, else the environment, else `default`.
macro(itq3s_setting name default)
    if (NOT DEFINED ${name} OR "${${name}}" STREQUAL "")
        if (NOT "$ENV{${name}}" STREQUAL "")
            set(${name} "$ENV{${name}}")
        else()
            set(${name} "${default}")
        endif()
    endif()
endmacro()

macro(itq3s_settings)
    if (NOT "$ENV{XDG_CACHE_HOME}" STREQUAL "")
        set(ITQ3S_CACHE_HOME "$ENV{XDG_CACHE_HOME}")
    else()
        set(ITQ3S_CACHE_HOME "$ENV{HOME}/.cache")
    endif()
    if (EXISTS "${ITQ3S_REPOSITORY}/.venv/bin/python")
        set(ITQ3S_DEFAULT_PYTHON "${ITQ3S_REPOSITORY}/.venv/bin/python")
    else()
        find_program(ITQ3S_DEFAULT_PYTHON NAMES python3 python REQUIRED)
    endif()
    itq3s_setting(GGML_OPTIONS "")
    itq3s_setting(ITQ3S_TARGETS "")
    itq3s_setting(LLAMA_CPP_DIR "")
    itq3s_setting(ITQ3S_SOURCE "")
    itq3s_setting(GGUF_ITQ3S_CACHE "${ITQ3S_CACHE_HOME}/gguf-itq3s")
    itq3s_setting(Python3_EXECUTABLE "${ITQ3S_DEFAULT_PYTHON}")
    itq3s_setting(GGUF_ITQ3S_OUT "${ITQ3S_REPOSITORY}/build")
    foreach (path LLAMA_CPP_DIR ITQ3S_SOURCE GGUF_ITQ3S_CACHE GGUF_ITQ3S_OUT)
        if (NOT "${${path}}" STREQUAL "")
            get_filename_component(${path} "${${path}}" ABSOLUTE BASE_DIR "${ITQ3S_REPOSITORY}")
        endif()
    endforeach()
endmacro()

# Write what a script run at build time needs to know of this configuration.
function(itq3s_write_settings file)
    set(text "")
    foreach (name
            GGML_OPTIONS LLAMA_CPP_DIR ITQ3S_SOURCE GGUF_ITQ3S_CACHE Python3_EXECUTABLE GGUF_ITQ3S_OUT
            CMAKE_BUILD_TYPE CMAKE_TOOLCHAIN_FILE CMAKE_C_COMPILER CMAKE_CXX_COMPILER CMAKE_C_FLAGS CMAKE_CXX_FLAGS
            CMAKE_C_COMPILER_VERSION CMAKE_CXX_COMPILER_VERSION CMAKE_SHARED_LIBRARY_SUFFIX
            CMAKE_SHARED_MODULE_SUFFIX CMAKE_EXECUTABLE_SUFFIX)
        string(APPEND text "set(${name} [==[${${name}}]==])\n")
    endforeach()
    file(CONFIGURE OUTPUT "${file}" CONTENT "${text}" @ONLY)
endfunction()

# Stop with one line that says why; FATAL_ERROR alone would wrap it.
function(itq3s_fail)
    string(CONCAT text ${ARGN})
    message(NOTICE "error: ${text}")
    message(FATAL_ERROR "stopped")
endfunction()

# Hold a lock until the process ends; say so when somebody else has it.
function(itq3s_lock file what)
    get_filename_component(folder "${file}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    file(LOCK "${file}" GUARD PROCESS RESULT_VARIABLE busy TIMEOUT 0)
    if (busy)
        message(STATUS "waiting for another process that ${what}")
        file(LOCK "${file}" GUARD PROCESS RESULT_VARIABLE busy TIMEOUT 14400)
        if (busy)
            itq3s_fail("${file} is still locked by another process that ${what}: ${busy}")
        endif()
    endif()
endfunction()
