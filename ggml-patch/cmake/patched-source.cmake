# Make TREE the patched source of llama.cpp, for builds of it with other options and for checks; prints
# "upstream FOLDER", the plain one.
#
#   cmake -DTREE=FOLDER -P patched-source.cmake

cmake_minimum_required(VERSION 3.21)
include("${CMAKE_CURRENT_LIST_DIR}/settings.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/source.cmake")
itq3s_settings()

itq3s_upstream(upstream id)
itq3s_prepare_source("${upstream}" "${id}" "${TREE}")
message(STATUS "upstream ${upstream}")
