"""Python programs of llama.cpp and gguf-py, run in this process with our type and rescaled files known to them."""
