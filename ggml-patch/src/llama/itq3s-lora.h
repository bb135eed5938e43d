// LoRA adapters and models whose channels are rescaled.
//
// A converter may multiply what makes a channel and divide what reads it: it writes diag(r) W diag(c) in place of W, and
// the model stays what it is. An adapter B A was trained beside W, so beside that it has to be diag(r) B A diag(c). Both
// files say by the same keys what they are for; a pair that does not fit would run, and give other text.

#pragma once

#include "gguf.h"

#include <stdexcept>
#include <string>
#include <unordered_map>

// gains of norms multiplied into the matrices that read them
#define ITQ3S_NORMS_FOLDED "itq3s.norms_folded"
// a hash of what else is multiplied by what
#define ITQ3S_RESCALING    "itq3s.rescaling.id"

struct itq3s_rescaling {
    bool        folded = false;
    std::string id;

    bool operator==(const itq3s_rescaling & other) const { return folded == other.folded && id == other.id; }
};

inline itq3s_rescaling itq3s_rescaling_of(const struct gguf_context * file) {
    itq3s_rescaling found;
    const int64_t   folded = gguf_find_key(file, ITQ3S_NORMS_FOLDED);
    found.folded = folded >= 0 && gguf_get_kv_type(file, folded) == GGUF_TYPE_BOOL && gguf_get_val_bool(file, folded);
    const int64_t id = gguf_find_key(file, ITQ3S_RESCALING);
    if (id >= 0 && gguf_get_kv_type(file, id) == GGUF_TYPE_STRING) {
        found.id = gguf_get_val_str(file, id);
    }
    return found;
}

// metadata as llama_model keeps them, by gguf_kv_to_str
inline itq3s_rescaling itq3s_rescaling_of(const std::unordered_map<std::string, std::string> & metadata) {
    itq3s_rescaling found;
    const auto      folded = metadata.find(ITQ3S_NORMS_FOLDED);
    found.folded           = folded != metadata.end() && folded->second == "true";
    const auto id          = metadata.find(ITQ3S_RESCALING);
    if (id != metadata.end()) {
        found.id = id->second;
    }
    return found;
}

// throws unless the adapter is for a model that is rescaled like this one, or both are as they were
inline void itq3s_check_lora(const itq3s_rescaling & model, const struct gguf_context * file) {
    const itq3s_rescaling adapter = itq3s_rescaling_of(file);
    if (adapter == model) {
        return;
    }
    const bool   none = adapter == itq3s_rescaling();
    const char * what;
    if (model == itq3s_rescaling()) {
        what = "the adapter is for a model whose channels are rescaled, and this model's are not";
    } else if (none) {
        what = "the model's channels are rescaled, and the adapter is for one whose channels are not";
    } else {
        what = "the adapter is for a model whose channels are rescaled otherwise";
    }
    throw std::runtime_error(std::string(what) +
                             "; convert the adapter with: "
                             "gguf-itq3s convert-lora ADAPTER out.gguf --base MODEL_DIR --model MODEL.gguf");
}
