"""For the optimizers of tests/detect."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "detect"))  # for optimizer_variants
