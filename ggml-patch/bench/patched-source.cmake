# Make OUT/patched the patched source of llama.cpp, for builds of it with other options; prints "upstream FOLDER", the
# plain one.
#
#   cmake -DOUT=FOLDER -P patched-source.cmake

cmake_minimum_required(VERSION 3.21)
include("${CMAKE_CURRENT_LIST_DIR}/../cmake/settings.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/../cmake/source.cmake")
itq3s_settings()

set(id unknown)
if (LLAMA_CPP_DIR STREQUAL "")
    itq3s_fetch(upstream id)
else()
    set(upstream "${LLAMA_CPP_DIR}")
endif()
itq3s_prepare_source("${upstream}" "${id}" "${OUT}/patched")
message(STATUS "upstream ${upstream}")
