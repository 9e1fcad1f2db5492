"""Removes late answers of the terminal from its input, which Textual would type into the prompt."""

import re

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS

# strings of OSC, DCS, and APC up to BEL or ST; the end may follow in the next piece
_STRING = re.compile(r"\x1b(?:\]\d+;|P[\d$>!+]|_G)[^\x07\x1b]*(?:(?P<end>\x07|\x1b\\)|\x1b?\Z|(?=\x1b))")
_REST = re.compile(r"[^\x07\x1b]*(?:\x07|\x1b?\\)")
_ATTRIBUTES = re.compile(r"\x1b\[[?>=][\d;]*[A-Za-z]")
_NUMBERED = re.compile(r"\x1b\[\d+~")  # a key; Textual takes the number of an unknown one for a character
_PASTE = ("\x1b[200~", "\x1b[201~")


class AnswerFilter:
    """Removes answers and unknown keys from the input of a terminal, which arrives in pieces."""

    def __init__(self) -> None:
        self._is_inside = False  # whether the last piece ended inside an answer

    def clean(self, piece: str) -> str:
        """Return the piece without answers. Text after an answer that never ends is kept."""
        if self._is_inside and (rest := _REST.match(piece)) is not None:
            piece = piece[rest.end() :]
        ends = [found for found in _STRING.finditer(piece) if found.end() == len(piece)]
        self._is_inside = bool(ends) and ends[-1]["end"] is None
        piece = _ATTRIBUTES.sub("", _STRING.sub("", piece))
        return _NUMBERED.sub(lambda found: found[0] if _is_known(found[0]) else "", piece)


def _is_known(sequence: str) -> bool:
    return sequence in ANSI_SEQUENCES_KEYS or sequence in _PASTE
