"""Byte-pair models of the `tokenizers` library, from lists that a file gives and that are checked here.

The library panics on some malformed lists, so that nothing reaches it unchecked.
"""

from collections.abc import Collection, Iterable, Mapping

from tokenizers import models

from app.text.checked_fields import malformed
from app.text.tokenizer import library_errors


def split_merges(merges: Iterable[str]) -> list[tuple[str, str]]:
    """Merges written as two texts with a space between. One without a space gets an empty second text."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def merge_pairs(
    merges: Iterable[tuple[str, str]], vocab: Mapping[str, int], control: Collection[str], *, field: str
) -> list[tuple[str, str]]:
    """The pairs to merge, first to last.

    A merge that has to do with a `control` token is left out, since text never becomes one. Raises ModelFileError if a
    piece, or what two pieces make, is no token.
    """
    pairs = []
    for pair in merges:
        left, right = pair
        if left in vocab and right in vocab and left + right in vocab:
            pairs.append(pair)
        elif left not in control and right not in control and left + right not in control:
            raise malformed(
                f"{field}: the merge of {left!r} and {right!r} contains a text that is not in the vocabulary"
            )
    return pairs


def bpe_model(
    vocab: dict[str, int], pairs: list[tuple[str, str]], *, byte_fallback: bool = False, ignore_merges: bool = False
) -> models.BPE:
    """A byte-pair model. With `byte_fallback`, a character that is no token becomes its bytes' tokens, `<0x00>` on.

    Raises ModelFileError if one of these is missing that could be needed. Without `byte_fallback`, a character that is
    no token is left out, as llama.cpp does; byte-level vocabularies lack a byte only where text never has it.
    """
    if byte_fallback:
        _require_every_byte(vocab)
    with library_errors("building its vocabulary"):
        return models.BPE(
            vocab=vocab, merges=pairs, byte_fallback=byte_fallback, fuse_unk=byte_fallback, ignore_merges=ignore_merges
        )


def _require_every_byte(vocab: Mapping[str, int]) -> None:
    for byte in range(256):
        # Gemma has tokens for some ASCII characters in place of byte tokens.
        if f"<0x{byte:02X}>" not in vocab and (byte >= 0x80 or chr(byte) not in vocab):
            raise malformed(f"The vocabulary has no token for the byte 0x{byte:02X}: some texts cannot be encoded")
