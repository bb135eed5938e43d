"""One thread for the matrix products of numpy and PyTorch, set when imported: before either of them is.

The matrices of the tests are small. Threads that wait for each other cost three times the work, more where other
programs run too. Our own threads and those of llama.cpp are not concerned.
"""

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
