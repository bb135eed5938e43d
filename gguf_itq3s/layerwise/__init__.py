"""What runs a model layer by layer to quantize it: two streams, gradients, scores of types for a size."""
