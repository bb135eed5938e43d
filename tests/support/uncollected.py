"""No garbage is looked for from when this is imported until the tests are known: imports leave none worth the time.

``tests/conftest.py`` turns the collector on again.
"""

from __future__ import annotations

import gc

gc.disable()
