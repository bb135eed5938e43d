"""A folder of GGUF files comes in; its model card and an upload to the Hugging Face hub go out."""
