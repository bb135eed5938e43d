// Runs a fuzzer on files, without libFuzzer: replay FILE...

#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" int LLVMFuzzerInitialize(int * argc, char *** argv);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size);

// libFuzzer's own; a custom mutator needs it to link.
extern "C" size_t LLVMFuzzerMutate(uint8_t *, size_t size, size_t) {
    return size;
}

int main(int argc, char ** argv) {
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; ++i) {
        std::vector<uint8_t> data;
        FILE *               file = fopen(argv[i], "rb");
        if (!file) {
            perror(argv[i]);
            return 1;
        }
        for (int c; (c = fgetc(file)) != EOF;) {
            data.push_back((uint8_t) c);
        }
        fclose(file);
        fprintf(stderr, "%s\n", argv[i]);
        LLVMFuzzerTestOneInput(data.data(), data.size());
    }
    return 0;
}
