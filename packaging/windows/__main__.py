"""Start the installed program. The first start installs it. Packed into ingle.exe, with the wheel and the lock file."""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

SCRIPTS = "Scripts" if os.name == "nt" else "bin"
SUFFIX = ".exe" if os.name == "nt" else ""


def home_of(wheel: str) -> Path:
    """Return the folder of the program, which differs between versions."""
    local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    return Path(local) / "Programs" / "inglenook" / wheel.split("-")[1]


def install(home: Path, archive: zipfile.ZipFile, wheel: str) -> None:
    """Create the environment of the program. The wheel comes last: an interrupted installation starts again."""
    print("Installing Inglenook. This happens once and downloads about 300 MB.", file=sys.stderr)  # noqa: T201
    venv.create(home, with_pip=True, clear=True)
    pip = [str(home / SCRIPTS / f"python{SUFFIX}"), "-m", "pip", "install", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder, [wheel, "requirements.txt"])
        subprocess.run([*pip, "--require-hashes", "-r", str(Path(folder, "requirements.txt"))], check=True)
        subprocess.run([*pip, "--no-index", str(Path(folder, wheel))], check=True)


def main() -> int:
    """Run the program with the arguments of this process, and return its exit status."""
    with zipfile.ZipFile(sys.argv[0]) as archive:
        (wheel,) = (name for name in archive.namelist() if name.endswith(".whl"))
        home = home_of(wheel)
        program = home / SCRIPTS / f"ingle{SUFFIX}"
        if not program.exists():
            install(home, archive, wheel)
    return subprocess.call([str(program), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
