"""The programs of gguf-py that look at a GGUF file's metadata and change them, with our type known to them."""
