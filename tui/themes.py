"""The themes: hearth dark, hearth light, and the terminal's own colors for terminals with at most 16."""

from collections.abc import Container

from textual.theme import Theme

NIGHT = Theme(
    name="hearth-dark",
    primary="#e0925a",
    secondary="#7fa6a8",
    accent="#f2c078",
    warning="#e6b450",
    error="#e06c6c",
    success="#94b97c",
    foreground="#e8e0d8",
    background="#171412",
    surface="#1e1a17",
    panel="#2a2420",
    dark=True,
)
DAY = Theme(
    name="hearth-light",
    primary="#a4531c",
    secondary="#2f6a6d",
    accent="#8a5a00",
    warning="#8f5f00",
    error="#b3261e",
    success="#40702b",
    foreground="#2b2320",
    background="#fbf7f2",
    surface="#f3ece4",
    panel="#e8ddd2",
    dark=False,
)
TERMINAL = "ansi-dark"
FEW_COLORS = ("standard", "windows")


def pick_theme(wanted: str, color_system: str | None, there: Container[str]) -> str:
    """Return the wanted theme, or the default that the terminal can show."""
    if wanted in there:
        return wanted
    return TERMINAL if color_system in FEW_COLORS else NIGHT.name
