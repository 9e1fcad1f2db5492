"""Put the private folder on sys.path. Installed as inglenook/__init__.py.

A worker process that unpickles an object imports `inglenook` first. It then finds `app`, `engine`, `quant`, and `tui`
by the same names as the parent process, so that no generic names are needed in site-packages.
"""

import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
