"""What decides between codewords: the Hessian of a layer's inputs, its factors, and the search that uses them."""
