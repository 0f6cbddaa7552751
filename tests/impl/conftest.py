"""Warn once that the host engine runs as plain Python if numba is turned off."""

from __future__ import annotations

import pytest

from blockstep.impl.host import IS_COMPILED
from blockstep.impl.host.jit import warn_if_slow

if not IS_COMPILED:  # numba is switched off: the host engine is tested as Python, and says so
    with pytest.warns(RuntimeWarning, match="plain Python"):
        warn_if_slow()
