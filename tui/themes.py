"""The themes: dark, light, and high contrast, and the terminal's own colors for terminals with at most 16 colors."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from textual.color import Color
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
    variables={"border-blurred": "#85756a"},
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
    variables={"border-blurred": "#84745f"},
)
CONTRAST = Theme(
    name="hearth-contrast",
    primary="#ffb000",
    secondary="#7fdfff",
    accent="#ffd866",
    warning="#ffff00",
    error="#ff8080",
    success="#80ff80",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1c1c1c",
    dark=True,
    variables={"border-blurred": "#c0c0c0"},
)
OWN = (NIGHT, DAY, CONTRAST)

TERMINAL, TERMINAL_LIGHT = "ansi-dark", "ansi-light"
FEW_COLORS = ("standard", "windows")

# Backgrounds from the palette of 256 colors, because the nearest colors to the backgrounds above are yellow.
# The last one is for scroll bars, and for selected rows without the focus.
_PALETTE_BACKGROUNDS = {
    NIGHT.name: ("#121212", "#1c1c1c", "#262626", "#585858"),
    DAY.name: ("#ffffff", "#eeeeee", "#e4e4e4", "#bcbcbc"),
}


def own_themes(color_system: str | None) -> list[Theme]:
    """Return the themes of this program, adapted to the terminal's color system."""
    return [_in_palette(theme) for theme in OWN] if color_system == "256" else [*OWN]


def _in_palette(theme: Theme) -> Theme:
    if theme.name not in _PALETTE_BACKGROUNDS:
        return theme
    background, surface, panel, marked = _PALETTE_BACKGROUNDS[theme.name]
    variables = dict.fromkeys(("scrollbar", "block-cursor-blurred-background"), marked)
    return replace(
        theme, background=background, surface=surface, panel=panel, variables={**theme.variables, **variables}
    )


def pick_theme(wanted: str, color_system: str | None, there: Container[str], *, is_dark: bool = True) -> str:
    """Return the theme `wanted` if the terminal can show it, else the default theme.

    A terminal with at most 16 colors cannot show the themes of this program. `is_dark`: whether its background is dark.
    """
    if color_system in FEW_COLORS and (wanted not in there or wanted in {theme.name for theme in OWN}):
        is_light = wanted == DAY.name or (wanted not in there and not is_dark)
        return TERMINAL_LIGHT if is_light else TERMINAL
    if wanted in there:
        return wanted
    return NIGHT.name if is_dark else DAY.name


# fraction of the foreground color, mixed with the background
_MUTED = {"text-muted": 0.6, "text-disabled": 0.5}
_MUTED_ON_LIGHT = {"text-muted": 0.74, "text-disabled": 0.68}


def muted_colors(variables: Mapping[str, str]) -> dict[str, str]:
    """Return solid colors for muted and disabled text; none for themes that use the terminal's own colors.

    Textual defines both as "auto" with an alpha value. `Content` drops the alpha of automatic colors, which would make
    such text the brightest on the screen.
    """
    background, foreground = Color.parse(variables["background"]), Color.parse(variables["foreground"])
    if background.ansi is not None or foreground.ansi is not None:
        return {}
    shares = _MUTED if background.brightness < foreground.brightness else _MUTED_ON_LIGHT
    return {name: background.blend(foreground, share, alpha=1.0).hex for name, share in shares.items()}


def ordered(names: Iterable[str]) -> Sequence[str]:
    """Return the names of themes, with those of this program first."""
    own = [theme.name for theme in OWN]
    return sorted(names, key=lambda name: (own.index(name) if name in own else len(own), name))


def find_theme(typed: str, names: Iterable[str]) -> str | None:
    """Return the theme that the user means: the one of that name, or the only one of this program that contains it."""
    known, own = set(names), {theme.name for theme in OWN}
    if typed in known:
        return typed
    similar = [name for name in own & known if typed and typed.lower() in name]
    return similar[0] if len(similar) == 1 else None
