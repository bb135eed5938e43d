// LoRA adapters and models whose norms are folded.
//
// A converter that multiplies the gain g of a norm into the matrices that read it writes W diag(g), and gains of one. An
// adapter B A was trained beside W, on activations with the gain, so beside W diag(g) it has to be B A diag(g). Both
// files say what they are by the same key; a pair that does not fit would run, and give other text.

#pragma once

#include "gguf.h"

#include <stdexcept>
#include <string>
#include <unordered_map>

#define ITQ3S_NORMS_FOLDED "itq3s.norms_folded"

inline bool itq3s_norms_folded(const struct gguf_context * file) {
    const int64_t id = gguf_find_key(file, ITQ3S_NORMS_FOLDED);
    return id >= 0 && gguf_get_kv_type(file, id) == GGUF_TYPE_BOOL && gguf_get_val_bool(file, id);
}

// metadata as llama_model keeps them, by gguf_kv_to_str
inline bool itq3s_norms_folded(const std::unordered_map<std::string, std::string> & metadata) {
    const auto found = metadata.find(ITQ3S_NORMS_FOLDED);
    return found != metadata.end() && found->second == "true";
}

// throws unless adapter and model are both folded, or neither
inline void itq3s_check_lora(bool model_is_folded, const struct gguf_context * adapter) {
    const bool adapter_is_folded = itq3s_norms_folded(adapter);
    if (model_is_folded && !adapter_is_folded) {
        throw std::runtime_error("the model's norms are folded (" ITQ3S_NORMS_FOLDED
                                 ") and the adapter is for one whose norms are not; "
                                 "convert the adapter with: gguf-itq3s convert-lora ADAPTER out.gguf --base MODEL_DIR");
    }
    if (adapter_is_folded && !model_is_folded) {
        throw std::runtime_error(
            "the adapter is for a model whose norms are folded (" ITQ3S_NORMS_FOLDED
            ") and this model's are not; "
            "convert the adapter with: gguf-itq3s convert-lora ADAPTER out.gguf --base MODEL_DIR --no-fold-norms");
    }
}
