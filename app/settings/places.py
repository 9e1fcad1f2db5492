"""The folders in which other programs keep the settings of this user, and the file of the user's key."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of settings."""

    key_file: Path  # of the key that this user's programs may send
    home: Path
    config: Path  # of programs that follow the XDG directories on all systems
    programs: Path  # of desktop programs
    claude: Path
    codex: Path
    pi: Path
    llm: Path
    is_windows: bool = False
    project: Path | None = None  # folder of the project whose settings are written; None: those of the user


def places_of(
    environment: Mapping[str, str], key_file: Path, project: Path | None = None, system: str = sys.platform
) -> Places:
    """Return the folders by the variables of an environment. `system`: as in sys.platform."""
    is_windows = system == "win32"
    given = environment.get("USERPROFILE" if is_windows else "HOME")
    home = Path(given) if given else Path.home()
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    programs = config
    if is_windows:
        programs = Path(environment.get("APPDATA") or home / "AppData" / "Roaming")
    elif system == "darwin":
        programs = home / "Library" / "Application Support"
    return Places(
        key_file=key_file,
        home=home,
        config=config,
        programs=programs,
        claude=Path(environment.get("CLAUDE_CONFIG_DIR") or home / ".claude"),
        codex=Path(environment.get("CODEX_HOME") or home / ".codex"),
        pi=Path(environment.get("PI_CODING_AGENT_DIR") or home / ".pi" / "agent"),
        llm=Path(environment.get("LLM_USER_PATH") or programs / "io.datasette.llm"),
        is_windows=is_windows,
        project=project,
    )
