"""LoRA adapters for converted models: llama.cpp's own converter, and the gains of folded norms."""
