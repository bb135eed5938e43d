# Builds one target of ../CMakeLists.txt, or takes it from the cache:
#
#   cmake -DSETTINGS=FILE -DWANTED=llama|demo|TARGET -P build.cmake
#
# TARGET is any program of llama.cpp's own build; it is put beside the tools of `llama`, which has to be built first.

cmake_minimum_required(VERSION 3.21)
include("${CMAKE_CURRENT_LIST_DIR}/settings.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/source.cmake")
include("${SETTINGS}")

set(tools llama-cli llama-completion llama-perplexity llama-bench llama-quantize llama-imatrix llama-server
    llama-gguf-split llama-batched-bench llama-embedding llama-export-lora llama-simple ggml-rpc-server test-quantize-fns)
# What `make demo` runs. It needs libllama alone: no chat templates, no server.
set(demo_tools llama-simple)
set(headers
    include/llama.h ggml/include/*.h ggml/src/ggml-common.h ggml/src/ggml-itq-types.h
    ggml/src/ggml-itq.h
    ggml/src/ggml-cpu/itq3s/itq-quants.h)

# Finished builds kept in the cache, of the tools and of single programs; the least recently used go.
set(kept 12)
set(kept_programs 48)

separate_arguments(user_options UNIX_COMMAND "${GGML_OPTIONS}")
if (WANTED IN_LIST tools)
    message(STATUS "${WANTED} is one of the tools that are always built")
    return()
endif()

# No network, no web interface, no HTTPS; runs from any folder.
set(options
    -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DBUILD_SHARED_LIBS=ON
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_NUMBER=0 -DGIT_EXE=OFF
    -DGGML_RPC=ON)
if (WANTED STREQUAL "llama")
    set(binaries ${tools})
elseif (WANTED STREQUAL "demo")
    set(binaries ${demo_tools})
else()
    set(binaries ${WANTED})
endif()
if ("${CMAKE_BUILD_TYPE}" STREQUAL "")
    set(CMAKE_BUILD_TYPE Release)
endif()
foreach (name CMAKE_BUILD_TYPE CMAKE_TOOLCHAIN_FILE CMAKE_C_COMPILER CMAKE_CXX_COMPILER CMAKE_C_FLAGS CMAKE_CXX_FLAGS)
    if (NOT "${${name}}" STREQUAL "")
        list(APPEND options "-D${name}=${${name}}")
    endif()
endforeach()
list(APPEND options ${user_options})

#
# the key
#

itq3s_upstream(upstream upstream_id)
if (LLAMA_CPP_DIR STREQUAL "")
    list(APPEND options "-DLLAMA_BUILD_COMMIT=${upstream_id}")
else()
    list(APPEND options "-DLLAMA_BUILD_COMMIT=unknown")
endif()

# Compiler and processor, as the compiler sees them: its predefined macros.
function(itq3s_compiler_macros out)
    separate_arguments(flags UNIX_COMMAND "${CMAKE_C_FLAGS}")
    if ("${options}" MATCHES "GGML_NATIVE=(OFF|0|FALSE|NO)" OR NOT "${CMAKE_TOOLCHAIN_FILE}" STREQUAL "")
        set(candidates "-DNONE")
    else()
        set(candidates -march=native -mcpu=native -DNONE)
    endif()
    file(WRITE "${GGUF_ITQ3S_OUT}/tree/empty.c" "")
    foreach (native IN LISTS candidates)
        execute_process(COMMAND "${CMAKE_C_COMPILER}" ${flags} ${native} -dM -E "${GGUF_ITQ3S_OUT}/tree/empty.c"
            OUTPUT_VARIABLE macros ERROR_QUIET RESULT_VARIABLE failed)
        if (NOT failed)
            break()
        endif()
    endforeach()
    set(${out} "${macros}" PARENT_SCOPE)
endfunction()

itq3s_compiler_macros(macros)
string(SHA256 macros "${macros}")
set(toolchain "")
if (NOT "${CMAKE_TOOLCHAIN_FILE}" STREQUAL "")
    file(SHA256 "${CMAKE_TOOLCHAIN_FILE}" toolchain)
endif()
set(cuda "")
if ("${options}" MATCHES "GGML_CUDA=(ON|1|TRUE|YES)")
    find_program(ITQ3S_NVCC NAMES "$ENV{CUDACXX}" nvcc PATHS /usr/local/cuda/bin)
    execute_process(COMMAND "${ITQ3S_NVCC}" --version OUTPUT_VARIABLE cuda ERROR_QUIET)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE capability ERROR_QUIET RESULT_VARIABLE failed)
    string(APPEND cuda "${capability}")
endif()
if (options MATCHES "GGML_VULKAN=(ON|1|TRUE|YES)")
    execute_process(COMMAND glslc --version OUTPUT_VARIABLE glslc ERROR_QUIET)
    string(APPEND cuda "\nglslc ${glslc}")
endif()
list(JOIN options "\n  " options_text)
string(CONCAT configuration
    "upstream ${upstream_id}\noptions\n  ${options_text}\n"
    "compilers ${CMAKE_C_COMPILER_VERSION} ${CMAKE_CXX_COMPILER_VERSION}, macros ${macros}\n"
    "toolchain ${toolchain}\ncuda ${cuda}\n")
string(SHA256 configuration_key "${configuration}")
string(SUBSTRING "${configuration_key}" 0 12 configuration_key)

# Set `out` to a regular expression of the names of our files.
function(itq3s_our_files out)
    file(GLOB_RECURSE files LIST_DIRECTORIES false "${ITQ3S_PATCH_DIR}/src/*.[ch]*")
    list(TRANSFORM files REPLACE "^.*/" "")
    list(REMOVE_DUPLICATES files)
    list(JOIN files "|" files)
    string(REPLACE "." "\\." files "${files}")
    set(${out} "^(${files})$" PARENT_SCOPE)
endfunction()

# Set `out` to what decides a build of these programs, and `folder` to where the cache keeps it.
function(itq3s_entry out folder name)
    set(content "${configuration}targets ${ARGN}\n")
    itq3s_hash_files(ours "${ITQ3S_PATCH_DIR}" "${ITQ3S_PATCH_DIR}/patches/*.patch" "${ITQ3S_PATCH_DIR}/src/format/*"
        "${ITQ3S_PATCH_DIR}/src/cpu/*" "${ITQ3S_PATCH_DIR}/src/cuda/*" "${ITQ3S_PATCH_DIR}/src/llama/*"
        "${ITQ3S_PATCH_DIR}/cmake/*.cmake")
    string(APPEND content "ggml-patch ${ours}\n")
    string(SHA256 key "${content}")
    string(SUBSTRING "${key}" 0 20 key)
    set(${out} "${content}" PARENT_SCOPE)
    set(${folder} "${GGUF_ITQ3S_CACHE}/build/${name}-${key}" PARENT_SCOPE)
endfunction()

if (WANTED STREQUAL "demo")
    # All tools, where they are built, are these and more; build/bin keeps what it has.
    itq3s_entry(content result llama ${tools})
    if (EXISTS "${result}/content.sha256")
        set(WANTED "llama")
        set(binaries ${tools})
    endif()
endif()
itq3s_entry(content result "${WANTED}" ${binaries})

#
# the build
#

function(itq3s_build)
    set(source "${GGUF_ITQ3S_OUT}/tree/llama.cpp")
    itq3s_prepare_source("${upstream}" "${upstream_id}" "${source}")
    set(work "${GGUF_ITQ3S_OUT}/tree/work-${configuration_key}")

    # paths relative to the tree, so that ccache hits across clones
    if ("$ENV{CCACHE_BASEDIR}" STREQUAL "")
        set(ENV{CCACHE_BASEDIR} "${GGUF_ITQ3S_OUT}/tree")
    endif()
    set(ENV{CCACHE_NOHASHDIR} "1")
    set(ENV{GIT_CEILING_DIRECTORIES} "${GGUF_ITQ3S_OUT}/tree")

    find_program(ITQ3S_NINJA NAMES ninja ninja-build)
    set(generator)
    if (NOT EXISTS "${work}/CMakeCache.txt" AND ITQ3S_NINJA AND "$ENV{CMAKE_GENERATOR}" STREQUAL "")
        set(generator -G Ninja)
    endif()
    message(STATUS "configuring llama.cpp (log: ${work}/configure.log)")
    file(MAKE_DIRECTORY "${work}")
    execute_process(COMMAND ${CMAKE_COMMAND} -S "${source}" -B "${work}" ${generator} ${options}
            "-DCMAKE_PROJECT_llama.cpp_INCLUDE=${ITQ3S_PATCH_DIR}/cmake/quick.cmake"
        OUTPUT_FILE "${work}/configure.log" ERROR_FILE "${work}/configure.log" RESULT_VARIABLE failed)
    if (failed)
        file(READ "${work}/configure.log" log)
        itq3s_fail("llama.cpp could not be configured:\n${log}")
    endif()
    file(STRINGS "${work}/configure.log" lacks REGEX "not supported by glslc")
    if (lacks)
        list(TRANSFORM lacks REPLACE "^-- ([^ ]+) .*" "\\1")
        list(JOIN lacks ", " lacks)
        message(NOTICE "note: this glslc is too old for some shaders, which are left out of the Vulkan backend "
            "(${lacks}); devices that could use them are slower, not wrong")
    endif()

    # Not every source and configuration has all of them: what links the CPU backend is missing where backends are
    # plug-ins (GGML_BACKEND_DL), older sources have fewer tools.
    execute_process(COMMAND ${CMAKE_COMMAND} --build "${work}" --target help
        OUTPUT_VARIABLE offered ERROR_VARIABLE offered RESULT_VARIABLE failed)
    if (NOT failed)
        string(REPLACE "\n... " "\n" offered "\n${offered}")  # make's way of listing, ninja has a name and a colon
        string(REGEX MATCHALL "\n[A-Za-z0-9_.+-]+" offered "${offered}")
        list(TRANSFORM offered REPLACE "\n" "")
        set(missing ${binaries})
        list(REMOVE_ITEM missing ${offered})
        list(REMOVE_ITEM binaries ${missing})
        list(JOIN missing ", " text)
        if (missing AND NOT binaries)
            itq3s_fail("this llama.cpp, with these options, has no program ${text}")
        elseif (missing)
            message(STATUS "this llama.cpp, with these options, has no ${text}")
        endif()
    endif()

    # as many jobs as make or cmake --build --parallel was given, else one a core
    if ("$ENV{MAKEFLAGS}" MATCHES "(^| )-?j([0-9]+)")
        set(jobs "${CMAKE_MATCH_2}")
    elseif ("$ENV{CMAKE_BUILD_PARALLEL_LEVEL}" MATCHES "^[0-9]+$")
        set(jobs "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}")
    else()
        cmake_host_system_information(RESULT jobs QUERY NUMBER_OF_LOGICAL_CORES)
    endif()
    foreach (name MAKEFLAGS MFLAGS MAKELEVEL)
        unset(ENV{${name}})  # a make inside is on its own
    endforeach()
    list(JOIN binaries ", " text)
    message(STATUS "building ${text} (log: ${work}/build.log)")
    itq3s_our_files(ours)
    execute_process(COMMAND "${Python3_EXECUTABLE}" "${ITQ3S_PATCH_DIR}/cmake/progress.py" "${work}/build.log" "${ours}"
            ${CMAKE_COMMAND} --build "${work}" --parallel ${jobs} --target ${binaries}
        RESULT_VARIABLE failed)
    if (failed)
        itq3s_fail("llama.cpp did not build, the reason stands above. "
            "Run the same command to go on from where it stopped.")
    endif()

    # complete once it has its name; what a killed build left is of no use
    file(GLOB left "${result}.partial-*")
    if (left)
        file(REMOVE_RECURSE ${left})
    endif()
    string(RANDOM LENGTH 8 suffix)
    set(partial "${result}.partial-${suffix}")
    file(MAKE_DIRECTORY "${partial}/bin" "${partial}/include")
    foreach (binary IN LISTS binaries)
        set(program "${work}/bin/${binary}${CMAKE_EXECUTABLE_SUFFIX}")
        if (NOT EXISTS "${program}")
            itq3s_fail("the target ${binary} of llama.cpp leaves no program of this name")
        endif()
        file(COPY "${program}" DESTINATION "${partial}/bin")
    endforeach()
    file(GLOB libraries RELATIVE "${work}/bin" "${work}/bin/*${CMAKE_SHARED_LIBRARY_SUFFIX}*"
        "${work}/bin/*${CMAKE_SHARED_MODULE_SUFFIX}")
    if (NOT WANTED MATCHES "^(llama|demo)$")
        # a single program finds those of the tools beside it
        itq3s_entry(unused base llama ${tools})
        file(GLOB there RELATIVE "${base}/bin" "${base}/bin/*")
        list(REMOVE_ITEM libraries ${there})
    endif()
    foreach (library IN LISTS libraries)
        file(COPY "${work}/bin/${library}" DESTINATION "${partial}/bin")
    endforeach()
    if (WANTED MATCHES "^(llama|demo)$")
        foreach (pattern IN LISTS headers)
            file(GLOB files "${source}/${pattern}")
            file(COPY ${files} DESTINATION "${partial}/include")
        endforeach()
    endif()
    file(WRITE "${partial}/build.txt" "${content}")
    itq3s_hash_build(sha256 "${partial}")
    file(WRITE "${partial}/content.sha256" "${sha256}\n")
    file(REMOVE_RECURSE "${result}")
    file(RENAME "${partial}" "${result}")
endfunction()

# Set `out` to a hash over all that a finished build in the cache is.
function(itq3s_hash_build out folder)
    itq3s_hash_files(sha256 "${folder}" "${folder}/bin/*" "${folder}/include/*" "${folder}/build.txt")
    set(${out} "${sha256}" PARENT_SCOPE)
endfunction()

# Throw away the builds in the cache that have not been used for longest: all but `kept` of those whose name matches.
function(itq3s_prune_cache kept)
    file(GLOB used "${GGUF_ITQ3S_CACHE}/build/*/used")
    list(FILTER used ${ARGN} REGEX "/(llama|demo)-[0-9a-f]*/used$")
    set(stamped "")
    foreach (file IN LISTS used)
        file(TIMESTAMP "${file}" time "%s" UTC)
        list(APPEND stamped "${time} ${file}")
    endforeach()
    list(SORT stamped ORDER DESCENDING)
    list(LENGTH stamped count)
    if (count GREATER kept)
        list(SUBLIST stamped ${kept} -1 stamped)
        foreach (item IN LISTS stamped)
            string(REGEX REPLACE "^[0-9]+ (.*)/used$" "\\1" folder "${item}")
            file(LOCK "${folder}.lock" GUARD FUNCTION RESULT_VARIABLE busy TIMEOUT 0)
            if (NOT busy)
                file(REMOVE_RECURSE "${folder}")
            endif()
        endforeach()
    endif()
endfunction()

# Copy the files of `from` into `to`. A link would let whoever writes into a clone's build/bin change the cache, and so
# every clone.
function(itq3s_copy_files from to)
    file(MAKE_DIRECTORY "${to}")
    file(GLOB files LIST_DIRECTORIES false RELATIVE "${from}" "${from}/*")
    foreach (file IN LISTS files)
        file(REMOVE "${to}/${file}")
        if (IS_SYMLINK "${from}/${file}")
            file(READ_SYMLINK "${from}/${file}" target)
            file(CREATE_LINK "${target}" "${to}/${file}" SYMBOLIC)
        else()
            file(COPY_FILE "${from}/${file}" "${to}/${file}")
        endif()
    endforeach()
endfunction()

itq3s_lock("${GGUF_ITQ3S_OUT}/tree/lock" "builds in ${GGUF_ITQ3S_OUT}")
itq3s_lock("${result}.lock" "builds the same llama.cpp")
set(recorded "none")
if (EXISTS "${result}/content.sha256")
    file(STRINGS "${result}/content.sha256" recorded LIMIT_COUNT 1)
    itq3s_hash_build(found "${result}")
    if (NOT recorded STREQUAL found)
        message(NOTICE "warning: ${result} is not what was built there; building it again")
        set(recorded "none")
    endif()
endif()
if (NOT recorded STREQUAL "none")
    message(STATUS "llama.cpp (${WANTED}) is up to date: ${result}")
else()
    itq3s_build()
    message(STATUS "llama.cpp (${WANTED}) is built: ${result}")
endif()
file(TOUCH "${result}/used")
itq3s_prune_cache(${kept} INCLUDE)
itq3s_prune_cache(${kept_programs} EXCLUDE)

# publish
if (NOT WANTED MATCHES "^(llama|demo)$")
    itq3s_copy_files("${result}/bin" "${GGUF_ITQ3S_OUT}/bin")
else()
    set(to "${GGUF_ITQ3S_OUT}")
    set(published "")
    if (EXISTS "${to}/bin/build.txt")
        file(READ "${to}/bin/build.txt" published)
    endif()
    file(READ "${result}/build.txt" current)
    file(GLOB files RELATIVE "${result}" "${result}/bin/*" "${result}/include/*")
    foreach (file IN LISTS files)
        if (NOT EXISTS "${to}/${file}")
            set(published "")
        endif()
    endforeach()
    if (NOT published STREQUAL current)
        foreach (folder bin include)
            file(REMOVE_RECURSE "${to}/${folder}.new")
            itq3s_copy_files("${result}/${folder}" "${to}/${folder}.new")
        endforeach()
        file(COPY_FILE "${result}/build.txt" "${to}/bin.new/build.txt")
        foreach (folder include bin)
            file(REMOVE_RECURSE "${to}/${folder}")
            file(RENAME "${to}/${folder}.new" "${to}/${folder}")
        endforeach()
    endif()
endif()
