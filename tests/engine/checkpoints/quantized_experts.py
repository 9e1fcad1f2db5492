"""Tiny mixtures of experts with random quantized linear layers, for every quantization format."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.engine.checkpoints.quantized_folders import KINDS, QuantizedFolder, edit_config, with_small_scales

CONFIG = Qwen3MoeConfig(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_experts=4,
    num_experts_per_tok=4,  # all of them, so that rounding changes no choice
    max_position_embeddings=512,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    head_dim=32,  # type: ignore[call-arg]
)


def quantized_experts(folder: Path, kind: str) -> QuantizedFolder:
    """Make a checkpoint with a quantized matrix per expert, as quantizers write it. Routers are not quantized.

    transformers loads the same values from a plain checkpoint.
    """
    torch.manual_seed(3)
    plain, path = folder / "plain", folder / "checkpoint"
    for it in (plain, path):
        Qwen3MoeForCausalLM(CONFIG).save_pretrained(it)
    rng, tensors, values, config = np.random.default_rng(7), dict[str, Tensor](), dict[str, Tensor](), {}
    for name, stored in sorted(load_file(plain / "model.safetensors").items()):
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj"):
            layer = with_small_scales(KINDS[kind](rng, *stored.shape))
            tensors |= {f"{stem}.{rest}": _plain_scales(tensor) for rest, tensor in layer.tensors.items()}
            values[name], config = torch.from_numpy(layer.values), layer.config
        else:
            tensors[name] = values[name] = 4 * stored if stem.endswith("gate") else stored
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=config)
    return QuantizedFolder(path, Qwen3MoeForCausalLM.from_pretrained(plain, dtype=torch.float32))


def _plain_scales(tensor: Tensor) -> Tensor:
    """Return scales in one dtype: their random dtypes would distinguish the experts."""
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).contiguous()
