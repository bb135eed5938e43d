"""A folder of GGUF files for others: its model card, and the upload to the Hugging Face hub."""
