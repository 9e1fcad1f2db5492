"""Tests for LaTeX math as text."""

import pytest

from tui.math_text import to_unicode


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\pi r^2", "π r²"),
        (r"a_1 + b^{n+1} \le \frac{1}{2}", "a₁ + bⁿ⁺¹ ≤ 1/2"),
        (r"x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", "x = (-b ± √(b² - 4ac))/2a"),
        (r"\sum_{i=1}^{n} i", "∑ᵢ₌₁ⁿ i"),
        (r"f: \mathbb{R} \to \mathbb{R}", "f: ℝ → ℝ"),
        (r"90^\circ", "90°"),
        (r"\left( \text{area} \right)", "( area )"),
        (r"e^{Q}", "e^Q"),
        (r"e^{i\pi}+1=0", "e^(iπ)+1=0"),
        (r"\unknown{x}", r"\unknown{x}"),
        (r"50\%", "50%"),
    ],
)
def test_formula_is_shown_with_unicode_symbols(latex: str, text: str) -> None:
    assert to_unicode(latex) == text
