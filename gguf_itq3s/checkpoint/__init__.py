"""What comes in: Hugging Face checkpoints as GGUF tensors, folded norms, and which tensor gets which type."""
