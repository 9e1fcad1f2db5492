"""A byte-level GGUF vocabulary of a few hundred tokens, for tests that change parts of it."""

from gguf.constants import TokenType
from tokenizers import pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w")
CONTROL = ("<|bos|>", "<|im_end|>")


def metadata(**changes: object) -> dict[str, object]:
    """Return the metadata with changed fields.

    The keys of `changes` are the last parts of field names ("pre", "tokens", ...). None removes a field.
    """
    made = ("he", "ll", "hell", "hello", "Ġw")
    tokens = (*BYTES, *made, *CONTROL, "<tool>", "", "[PAD]x")
    types = [TokenType.NORMAL] * len(tokens)
    types[-5:] = [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL, TokenType.UNUSED]
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": tuple(map(int, types)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    fields |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in fields.items() if value is not None}
