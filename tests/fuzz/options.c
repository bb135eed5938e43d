// How the fuzzers' sanitizers behave, linked into each of them.

const char * __asan_default_options(void);

// What an assertion of llama.cpp held is lost when the header fuzzer goes on after it: leaks are not looked for. Memory
// that is refused is refused as by the system; libFuzzer's own new and free are not a pair where new is replaced.
const char * __asan_default_options(void) {
    return "detect_leaks=0:quarantine_size_mb=16:allocator_may_return_null=1:alloc_dealloc_mismatch=0";
}
