#!/usr/bin/env bash
# Builds the CUDA backend for the GPU of this machine, tests it against the CPU, measures it, and writes gpu_check.json
# and gpu_check.md. What it does and its options: gpu_check.sh --help.
set -euo pipefail

here=$(cd "${BASH_SOURCE[0]%/*}" && pwd)
exec python3 "$here/gpu_check.py" "$@"
