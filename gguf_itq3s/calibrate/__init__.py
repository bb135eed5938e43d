"""Statistics of activations, and quantizing a model while it runs, layer by layer, by one process or several."""
