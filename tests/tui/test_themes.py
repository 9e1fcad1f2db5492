"""Tests for the themes: their contrast, and the choice of a theme that the terminal can show."""

import pytest
from rich.color import Color as RichColor
from rich.color import ColorSystem
from textual.color import Color
from textual.theme import Theme

from tui import themes

ALL = [*themes.own_themes("truecolor"), *themes.own_themes("256")]
NAMES = ["hearth-dark", "hearth-light", "hearth-contrast", "ansi-dark", "ansi-light", "nord"]


def luminance(color: Color) -> float:
    """Return the relative luminance as defined by WCAG 2.1."""
    parts = (value / 255 for value in color.rgb)
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lower, higher = sorted(luminance(Color.parse(color)) for color in (one, other))
    return (higher + 0.05) / (lower + 0.05)


@pytest.mark.parametrize("theme", ALL, ids=lambda theme: f"{theme.name} {theme.background}")
def test_contrast_of_borders_is_at_least_three_and_of_text_seven(theme: Theme) -> None:
    colors = theme.to_color_system().generate()
    for background in (colors["background"], colors["surface"], colors["panel"]):
        for border in (colors["border-blurred"], colors["primary"], colors["warning"]):
            assert contrast(border, background) >= 3
        assert contrast(colors["foreground"], background) >= 7


@pytest.mark.parametrize("theme", themes.own_themes("256"), ids=lambda theme: theme.name)
def test_backgrounds_are_gray_in_a_palette_of_256_colors(theme: Theme) -> None:
    for background in (theme.background, theme.surface, theme.panel):
        shown = RichColor.parse(str(background)).downgrade(ColorSystem.EIGHT_BIT).get_truecolor()
        assert len({*shown}) == 1


@pytest.mark.parametrize(
    ("wanted", "colors", "is_dark", "picked"),
    [
        ("auto", "truecolor", True, "hearth-dark"),
        ("auto", "truecolor", False, "hearth-light"),
        ("auto", "standard", True, "ansi-dark"),
        ("auto", "standard", False, "ansi-light"),
        ("nord", "truecolor", False, "nord"),
        ("hearth-light", "truecolor", True, "hearth-light"),
        ("hearth-light", "standard", True, "ansi-light"),
        ("hearth-contrast", "standard", True, "ansi-dark"),
        ("ansi-light", "standard", True, "ansi-light"),
    ],
)
def test_picked_theme_is_one_that_the_terminal_can_show(wanted: str, colors: str, is_dark: bool, picked: str) -> None:
    assert themes.pick_theme(wanted, colors, NAMES, is_dark=is_dark) == picked
