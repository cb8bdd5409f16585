"""Files that survive a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Write ``value`` so that a kill leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    os.replace(scratch, path)
