"""Suggests file names for saving code from replies."""

from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path

_NAME = "snippet"
_ENDINGS: Mapping[str, str] = {
    "bash": "sh", "c++": "cpp", "csharp": "cs", "css": "css", "c": "c", "cpp": "cpp", "diff": "diff", "go": "go",
    "html": "html", "java": "java", "javascript": "js", "js": "js", "json": "json", "jsx": "jsx", "kotlin": "kt",
    "latex": "tex", "lua": "lua", "markdown": "md", "md": "md", "perl": "pl", "php": "php", "powershell": "ps1",
    "py": "py", "python": "py", "r": "r", "rb": "rb", "ruby": "rb", "rust": "rs", "rs": "rs", "sh": "sh", "shell": "sh",
    "sql": "sql", "swift": "swift", "toml": "toml", "ts": "ts", "tsx": "tsx", "typescript": "ts", "xml": "xml",
    "yaml": "yaml", "yml": "yml", "zsh": "sh",
}  # fmt: skip


def suggested_name(language: str, folder: Path) -> str:
    """Return a file name for code in `language` that `folder` does not contain yet: snippet.py, or snippet-2.py."""
    word = language.strip().partition(" ")[0].lower()
    ending = _ENDINGS.get(word, "txt")
    if word in ("dockerfile", "makefile"):
        names = chain([word.capitalize()], (f"{word.capitalize()}-{number}" for number in count(2)))
    else:
        names = chain([f"{_NAME}.{ending}"], (f"{_NAME}-{number}.{ending}" for number in count(2)))
    return next(name for name in names if not (folder / name).exists())
