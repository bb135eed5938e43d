"""Statistics of a model's activations: how they are collected from text, and the folder that keeps them."""
