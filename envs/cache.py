"""Where things that can be made again are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where derived files are kept between runs: $SAGA_CACHE, else ``~/.cache/saga``."""
    return Path(os.environ.get("SAGA_CACHE") or "~/.cache/saga").expanduser()
