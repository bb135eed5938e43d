"""The format: rotation, trellis, scales, the bytes of a block, and the types' names in gguf-py. Read this room first.

Order of reading: ``transform`` (the Walsh-Hadamard rotation), ``trellis`` (codewords and the search), ``formats`` (what
a trellis-coded format is made of), ``scale`` (the scale of a block), ``blocks`` (the bytes), ``types`` (names and
numbers in gguf-py), ``packing`` and ``ternary`` (the ternary types), ``grids`` (ggml's types with a fixed grid),
``native`` (the same in C), ``registry`` (the codec class of gguf-py).
"""
