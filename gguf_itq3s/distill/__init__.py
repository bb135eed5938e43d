"""Self-distillation: training a checkpoint to the codes that a file will hold."""
