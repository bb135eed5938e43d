"""The format: rotation, trellis, scales, the bytes of a block, and the types' names in gguf-py. Read this room first.

Order of reading: ``transform`` (the Walsh-Hadamard rotation), ``trellis`` (codewords and the search), ``formats`` (what
a trellis-coded format is made of), ``family`` (which of them are types, with names and numbers), ``scale`` (the scale
of a block), ``blocks`` (the bytes), ``types`` (the types in gguf-py), ``ternary`` (the ternary types), ``grids``
(ggml's types with a fixed grid), ``native`` (the same in C), ``registry`` (the codec classes of gguf-py).
"""
