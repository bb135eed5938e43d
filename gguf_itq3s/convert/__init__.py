"""From a checkpoint to a GGUF file: the command, the way of a tensor through the encoder, the header, the output."""
