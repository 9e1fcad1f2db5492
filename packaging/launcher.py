"""Start the program. Installed as inglenook/__main__.py, beside app, engine, quant, and tui."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from app.cli import main

if __name__ == "__main__":
    sys.exit(main())
