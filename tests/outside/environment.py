"""A Python of its own for programs that others wrote, so that what they need does not meet what we need."""

import os
import subprocess
import sys
from pathlib import Path


def python_with(folder: Path, *requirements: str) -> Path:
    """The interpreter of an environment in `folder` that has these installed; made if it is not there."""
    environment = folder / "environment"
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *requirements], check=True)
    return python
