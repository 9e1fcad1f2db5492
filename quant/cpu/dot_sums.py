"""Sums of dot products of codes and activations, with as few instructions as the target allows.

Targets that multiply bytes to int16 need two more instructions for each product: one that widens it to int32, and one
that adds it. Here products are added as int16 for as long as their sum fits, and widened once. The sums are exact
integers, so all targets give the same.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

from quant.cpu.integer_dots import add_words, byte_pairs, dot, multiplies_byte_pairs
from quant.cpu.vector import Emit

Key = TypeVar("Key", bound=Hashable)

LARGEST_WORD = 2**15 - 1


class DotSums(Generic[Key]):
    """Int32 sums by key. Each starts with a given value, to which dot products of four bytes are added."""

    def __init__(self, e: Emit, totals: Mapping[Key, Any], bits: int) -> None:
        """`bits` is the number of bits of the codes."""
        self._e = e
        self._totals = dict(totals)
        self._bits = bits
        self._words: dict[Key, tuple[Any, int]] = {}  # sums of int16, and the bound of their magnitude

    def add(self, key: Key, codes: Any, x: Any, magnitude: int) -> None:
        """Add a dot product. `magnitude` is the largest one of the signed bytes x."""
        e, bound = self._e, 2 * ((1 << self._bits) - 1) * magnitude
        if not multiplies_byte_pairs(e) or bound > LARGEST_WORD:
            self._totals[key] = dot(e, self._totals[key], codes, x, self._bits)
            return
        if key in self._words and self._words[key][1] + bound > LARGEST_WORD:
            self._widen(key)
        products = byte_pairs(e, codes, x)
        if key in self._words:
            words, before = self._words[key]
            products, bound = e.b.add(words, products), before + bound
        self._words[key] = products, bound

    def totals(self) -> dict[Key, Any]:
        """Return the sums. Nothing can be added afterwards."""
        for key in list(self._words):
            self._widen(key)
        return self._totals

    def _widen(self, key: Key) -> None:
        words, _ = self._words.pop(key)
        self._totals[key] = add_words(self._e, self._totals[key], words)
