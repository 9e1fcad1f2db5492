"""Byte-pair models of the `tokenizers` library, built from lists in a model file.

The lists are checked here, because the library panics on some malformed ones.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from tokenizers import models

from app.text.checked_fields import malformed
from app.text.tokenizer import library_errors


def split_merges(merges: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Split merges written as two strings with a space between them. Without a space, the second string is empty."""
    return ((left, right) for left, _, right in (merge.partition(" ") for merge in merges))


def merge_pairs(
    merges: Iterable[tuple[str, str]], vocab: Mapping[str, int], control: Collection[str], *, field: str
) -> list[tuple[str, str]]:
    """Return the merges to apply, in order. Their strings are the keys of `vocab`, so that they take no more memory.

    Merges that involve a `control` token are left out, because text never becomes one. Raises ModelFileError if a part
    or the result of a merge is not in the vocabulary.
    """
    keys = {key: key for key in vocab}
    pairs = []
    for left, right in merges:
        if left in keys and right in keys and left + right in keys:
            pairs.append((keys[left], keys[right]))
        elif left not in control and right not in control and left + right not in control:
            raise malformed(
                f"{field}: the merge of {left!r} and {right!r} contains a string that is not in the vocabulary"
            )
    return pairs


def bpe_model(
    vocab: dict[str, int], pairs: list[tuple[str, str]], *, byte_fallback: bool = False, ignore_merges: bool = False
) -> models.BPE:
    """Return a byte-pair model. With `byte_fallback`, unknown characters become byte tokens, `<0x00>` and so on.

    Raises ModelFileError if a byte token that may be needed is missing. Without `byte_fallback`, unknown characters are
    dropped, as in llama.cpp. Byte-level vocabularies only lack bytes that never occur in text.
    """
    if byte_fallback:
        _require_every_byte(vocab)
    with library_errors("building its vocabulary"):
        return models.BPE(
            vocab=vocab, merges=pairs, byte_fallback=byte_fallback, fuse_unk=byte_fallback, ignore_merges=ignore_merges
        )


def _require_every_byte(vocab: Mapping[str, int]) -> None:
    for byte in range(256):
        # For some ASCII characters, Gemma has ordinary tokens instead of byte tokens.
        if f"<0x{byte:02X}>" not in vocab and (byte >= 0x80 or chr(byte) not in vocab):
            raise malformed(f"The vocabulary has no token for the byte 0x{byte:02X}: some texts cannot be encoded")
