"""Puts the private folder on sys.path. Installed as inglenook/__init__.py.

A worker process that unpickles one of our objects imports `inglenook` first and then finds `app`, `engine`, `quant` and
`tui` by the same names as the parent did, so nothing generic has to live in site-packages itself.
"""

import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
