"""The format: rotation, trellis, scales, the bytes of a block, and the types' names in gguf-py. Read this room first.

Order of reading: ``transform`` (the Walsh-Hadamard rotation), ``trellis`` (codewords and the search), ``scale`` (the
scale of a block), ``blocks`` (the bytes), ``types`` (registration in gguf-py), ``packing`` and ``ternary`` (the ternary
types), ``native`` (the same in C).
"""
