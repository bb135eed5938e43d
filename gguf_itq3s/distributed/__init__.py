"""Several processes that do one piece of work, as torchrun starts them."""
