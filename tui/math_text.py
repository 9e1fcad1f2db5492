"""Converts LaTeX math to Unicode text: symbols, scripts, fractions, and roots. Unknown commands are kept."""

import re
from collections.abc import Mapping

_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_SIGNS = (
    "times div cdot pm mp le leq ge geq ne neq approx equiv sim propto infty partial nabla sum prod int in notin "
    "subset subseteq supset cup cap emptyset forall exists neg land lor to rightarrow leftarrow Rightarrow "
    "Leftarrow leftrightarrow Leftrightarrow implies iff mapsto ldots dots cdots circ degree perp parallel angle "
    "therefore because mid"
)
_SYMBOLS: Mapping[str, str] = {
    **dict(zip(_GREEK.split(), "αβγδεεζηθικλμνξπρστυφφχψωΓΔΘΛΞΠΣΦΨΩ", strict=True)),
    **dict(zip(_SIGNS.split(), "×÷·±∓≤≤≥≥≠≠≈≡∼∝∞∂∇∑∏∫∈∉⊂⊆⊃∪∩∅∀∃¬∧∨→→←⇒⇐↔⇔⇒⇔↦……⋯∘°⊥∥∠∴∵|", strict=True)),
}
_WORDS = re.compile("sin|cos|tan|cot|log|ln|exp|lim|max|min|det|dim|gcd|mod|arcsin|arccos|arctan")
_SETS = dict(zip("RNZQCP", "ℝℕℤℚℂℙ", strict=True))
_RAISED = dict(zip("0123456789+-=()nixyabcdefghjklmoprstuvwz", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᶜᵈᵉᶠᵍʰʲᵏˡᵐᵒᵖʳˢᵗᵘᵛʷᶻ", strict=True))
_LOWERED = dict(zip("0123456789+-=()aeijoruvxnmkhlpst", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₒᵣᵤᵥₓₙₘₖₕₗₚₛₜ", strict=True))
_GROUP = r"\{([^{}]*)\}"
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|mathit|operatorname|boxed)\s*" + _GROUP)
_SET = re.compile(r"\\mathbb\s*(?:\{([RNZQCP])\}|([RNZQCP]))")
_FRACTION = re.compile(r"\\[dt]?frac\s*" + _GROUP + r"\s*" + _GROUP)
_ROOT = re.compile(r"\\sqrt\s*" + _GROUP)
_SCRIPT = re.compile(r"([\^_])(?:\{([^{}]*)\}|(\\[A-Za-z]+|[^\s{}\\(]))")  # "^(" is the result of an earlier pass
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|[,;:!])(?![A-Za-z])|\\quad|\\qquad")
_DEEPEST = 8  # maximum depth of nested groups


def to_unicode(latex: str) -> str:
    """Return a formula as Unicode text. `latex` has no delimiters."""
    text = _SPACING.sub(lambda found: " " if found[0][1] in ",;:q" else "", latex)
    text = _SET.sub(lambda found: _SETS[found[1] or found[2]], text)
    for _ in range(_DEEPEST):  # each pass replaces the innermost groups
        before = text
        text = _TEXT.sub(r"\1", text)
        text = _FRACTION.sub(lambda found: f"{_operand(found[1])}/{_operand(found[2])}", text)
        text = _ROOT.sub(lambda found: f"√{_operand(found[1])}", text)
        text = _SCRIPT.sub(_script, text)
        if text == before:
            break
    text = _COMMAND.sub(_command, text)
    return re.sub(r"\\([{}%$#&_])", r"\1", text).strip()


def _command(found: re.Match[str]) -> str:
    name = found[1]
    return _SYMBOLS.get(name) or (name if _WORDS.fullmatch(name) else found[0])


def _operand(text: str) -> str:
    """Return the operand of a fraction or a root, in parentheses unless it is one word."""
    text = _COMMAND.sub(_command, text.strip())
    return text if re.fullmatch(r"[\w.²³√]+", text) else f"({text})"


def _script(found: re.Match[str]) -> str:
    """Return a superscript or subscript. If a character has no raised or lowered form, keep the sign ^ or _."""
    text = _COMMAND.sub(_command, found[2] if found[2] is not None else found[3])
    small = _RAISED if found[1] == "^" else _LOWERED
    if all(letter in small for letter in text):
        return "".join(small[letter] for letter in text)
    if text == "∘":
        return "°"
    return f"{found[1]}{text}" if len(text) == 1 else f"{found[1]}({text})"
