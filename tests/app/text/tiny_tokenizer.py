"""A byte-level tokenizer of 300 tokens, built with the `tokenizers` library, for test checkpoints."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TEXTS = ("the quick brown fox jumps over the lazy dog", "a model answers what people ask of it", "    return value")
VOCABULARY = 300
BOS, EOS, TURN = "<s>", "</s>", "<|turn|>"


def byte_level() -> tokenizers.Tokenizer:
    """Return the tokenizer.

    BOS and EOS are the first ids. TURN is a special token, and `<tool>` is an added token that is not special.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        special_tokens=[BOS, EOS, TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    library.add_tokens(["<tool>"])
    return library
