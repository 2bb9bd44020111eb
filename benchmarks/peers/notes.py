"""What a peer writes down inside the process that it watches."""

from __future__ import annotations

import json
import os
import time
from typing import Any


def note(**found: Any) -> None:
    """Append one finding; processes of one script share the file."""
    with open(os.environ["NONFINITE_NOTES"], "a") as file:
        file.write(json.dumps({"time": time.time(), **found}) + "\n")
