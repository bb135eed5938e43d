#!/usr/bin/env bash
# Builds the CUDA backend for the GPU of this machine, tests it against the CPU, measures it, and writes
# gpu_check.json and gpu_check.md. Needs a GPU, nvcc, CMake, a C++ compiler and Python 3; no network.
#
#   scripts/check/gpu/gpu_check.sh [--packed DIR] [--out DIR] [--work DIR] [--jobs N] [--only STAGE]...
#
#   --packed  what scripts/check/gpu/pack.py wrote (default build/gpu-check)
#   --out     where the two results go (default build/gpu-check)
#   --work    the build and the logs (default build/gpu-check/work)
#   --only    run this stage even if it is done: source, build, ops, perplexity, bench, report
#
# A stage that is done is not run again while its inputs are the same, so an interrupted run goes on where it stopped.
# What a stage prints is in WORK/logs. A stage that fails does not keep the later ones that do not need it from running;
# the exit code is 1 then.
set -uo pipefail

root=$(cd "$(dirname "$0")/../../.." && pwd)
packed=$root/build/gpu-check
out=
work=
jobs=$(nproc)
only=()
while [ $# -gt 0 ]; do
    case $1 in
        --packed) packed=$2; shift 2 ;;
        --out)    out=$2;    shift 2 ;;
        --work)   work=$2;   shift 2 ;;
        --jobs)   jobs=$2;   shift 2 ;;
        --only)   only+=("$2"); shift 2 ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        *) echo "error: $1: unknown argument; see --help" >&2; exit 1 ;;
    esac
done
out=${out:-$packed}
work=${work:-$packed/work}

fail() { echo "error: $*" >&2; exit 1; }

for tool in nvcc cmake python3 nvidia-smi tar; do
    command -v "$tool" > /dev/null || fail "$tool: not found; put it on PATH"
done
[ -f "$packed/llama.cpp.tar.xz" ] || fail "$packed/llama.cpp.tar.xz: not there; make it with scripts/check/gpu/pack.py"
mkdir -p "$out" "$work/logs" "$work/done" || fail "$work: cannot be written"
packed=$(cd "$packed" && pwd); out=$(cd "$out" && pwd); work=$(cd "$work" && pwd)

arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d '. ')
[ -n "$arch" ] || fail "nvidia-smi: no GPU found"
case $arch in 12?) arch=${arch}a ;; esac

ours=$(cd "$root" && find ggml-patch scripts/check/gpu -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
input=$(cat "$packed/llama.cpp.tar.xz" "$packed/demo-itq3_s.gguf" "$packed/text.txt" 2> /dev/null | sha256sum | cut -c1-16)
key="$ours $input sm_$arch $(nvcc --version | sha256sum | cut -c1-16)"
failed=0
child=
trap '[ -z "$child" ] || kill "$child" 2> /dev/null; exit 130' INT TERM # timeout passes it on to all of the stage

# stage NAME SECONDS FUNCTION: run it unless it is done, with its output in a log.
stage() {
    local name=$1 limit=$2 what=$3 start=$SECONDS
    if [ ${#only[@]} -gt 0 ] && [[ " ${only[*]} " != *" $name "* ]]; then
        [ "$(cat "$work/done/$name" 2> /dev/null)" = "$key" ]; return
    fi
    if [ ${#only[@]} -eq 0 ] && [ "$(cat "$work/done/$name" 2> /dev/null)" = "$key" ]; then
        echo "$name: done before"
        return 0
    fi
    rm -f "$work/done/$name"
    echo "$name: running, log in $work/logs/$name.log"
    export root packed out work jobs arch
    export -f "$what"
    timeout "$limit" bash -c "set -euo pipefail; $what" > "$work/logs/$name.log" 2>&1 &
    child=$!
    if wait "$child"; then
        echo "$key" > "$work/done/$name"
        echo "$name: done in $((SECONDS - start)) s"
        return 0
    fi
    echo "$name: failed after $((SECONDS - start)) s; the end of its log:" >&2
    tail -n 15 "$work/logs/$name.log" >&2
    failed=1
    return 1
}

stage_source() {
    rm -f "$work"/bench.json "$work"/ops-*.txt "$work"/ppl-*.txt # results of another source
    rm -rf "$work/upstream"
    mkdir "$work/upstream"
    tar -xf "$packed/llama.cpp.tar.xz" -C "$work/upstream" --strip-components=1
    cmake -DTREE="$work/llama.cpp" -DLLAMA_CPP_DIR="$work/upstream" -DPython3_EXECUTABLE="$(command -v python3)" \
        -P "$root/ggml-patch/cmake/patched-source.cmake"
}

stage_build() {
    cmake -S "$work/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" \
        -DGGML_CUDA=ON -DGGML_CUDA_FA=OFF -DGGML_CUDA_NCCL=OFF -DGGML_NATIVE=ON \
        -DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_NUMBER=0 \
        -DLLAMA_BUILD_COMMIT=pinned -DGIT_EXE=OFF
    cmake --build "$work/build" --parallel "$jobs" --target test-backend-ops llama-perplexity
    nvcc -std=c++17 -O2 -cudart shared -extended-lambda -use_fast_math -gencode "arch=compute_$arch,code=sm_$arch" \
        -I"$work/llama.cpp/ggml/include" -I"$work/llama.cpp/ggml/src" -I"$work/llama.cpp/ggml/src/ggml-cuda" \
        "$root/scripts/check/gpu/bench.cu" -o "$work/build/bin/gpu-bench" \
        -L"$work/build/bin" -lggml-cuda -lggml-base -lcublas -Xlinker "-rpath,\$ORIGIN"
}

# Every case of the three types; the line "N/M tests passed" of each operation is read by the report.
stage_ops() {
    rm -f "$work"/ops-*.txt
    local result=0
    for op in MUL_MAT MUL_MAT_ID MUL_MAT_VEC_FUSION GET_ROWS; do
        "$work/build/bin/test-backend-ops" test -b CUDA0 -o "$op" -p 'type(_a)?=(itq3_s|tq1_0|tq2_0)' -j 4 \
            > "$work/ops-$op.txt" 2>&1 || result=1
        grep -E 'FAIL|tests passed' "$work/ops-$op.txt" | tail -n 40
        grep -qE '[1-9][0-9]*/[0-9]+ tests passed' "$work/ops-$op.txt" || { echo "$op: no case ran"; result=1; }
    done
    return $result
}

# The bundled model: CPU, all layers on the GPU, one layer, CUDA graphs off, split by rows.
stage_perplexity() {
    rm -f "$work"/ppl-*.txt
    ppl() {
        local name=$1; shift
        "$work/build/bin/llama-perplexity" -m "$packed/demo-itq3_s.gguf" -f "$packed/text.txt" -c 512 --chunks 16 "$@" \
            > "$work/ppl-$name.txt" 2>&1
        echo "$name: $(grep 'Final estimate' "$work/ppl-$name.txt")"
    }
    ppl cpu     -dev none -t "$jobs"
    ppl gpu     -ngl 99
    ppl partial -ngl 2
    ppl rows    -ngl 99 -sm row
    # Batches of 8 tokens take the kernels of generation, of 24 the narrow tiles.
    ppl batch8  -ngl 99 -b 512 -ub 8
    ppl batch24 -ngl 99 -b 512 -ub 24
    GGML_CUDA_DISABLE_GRAPHS=1 ppl nographs -ngl 99 -b 512 -ub 8
}

stage_bench() {
    rm -f "$work/bench.json"
    "$work/build/bin/gpu-bench" --runs 31 > "$work/bench.json.partial"
    mv "$work/bench.json.partial" "$work/bench.json"
}

stage_report() {
    python3 "$root/scripts/check/gpu/report.py" --work "$work" --out "$out"
}

if stage source 120 stage_source && stage build 540 stage_build; then
    stage ops 240 stage_ops
    [ -f "$packed/demo-itq3_s.gguf" ] && stage perplexity 120 stage_perplexity
    stage bench 240 stage_bench
fi
only=() # whatever ran, the report is made anew
rm -f "$work/done/report"
stage report 30 stage_report && cat "$out/gpu_check.md"
exit $failed
