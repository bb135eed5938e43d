// Stands in for upstream's quantize.cuh, of which our launchers use nothing but what it includes.

#pragma once

#include "common.cuh"
#include "mmq.cuh"
