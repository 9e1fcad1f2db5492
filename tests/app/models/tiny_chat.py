"""Create a folder with a tiny random chat model as transformers saves it: weights, vocabulary, template, sampling."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.app.text.tiny_tokenizer import BOS, EOS, VOCABULARY, byte_level

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>{% endfor %}assistant:"


def save(folder: Path, *, shard_size: str = "5GB", **generation: object) -> None:
    """Write the model to a folder. Its greedy replies do not end by themselves within the first tokens."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    model: Any = LlamaForCausalLM(config)
    model.generation_config.update(eos_token_id=[1], bos_token_id=0, **generation)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token=BOS, eos_token=EOS)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
