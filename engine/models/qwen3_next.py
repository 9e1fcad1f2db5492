"""Qwen3-Next and Qwen3-Coder-Next: the layers of Qwen 3.5 with experts, and other orders of rows.

`ssm_in` has the queries, keys, values, and gates of the first key head, then those of the next one, and `ssm_ba` its
step sizes and decays. Newer GGUF files have `attn_qkv` and `attn_gate` instead of `ssm_in`. Architectures:
`qwen3_next` in transformers checkpoints, and `qwen3next` in GGUF files.
"""

from collections.abc import Mapping
from dataclasses import replace

from engine.checkpoints.metadata import Metadata
from engine.model_config import ModelConfig
from engine.models.expert_config import with_experts
from engine.models.qwen import layers_with_experts
from engine.models.qwen35 import MIXER, MOE, read_gated_experts, read_hybrid
from engine.models.qwen35 import NAMES as QWEN35

NAMES = replace(
    QWEN35,
    stems=dict(QWEN35.stems) | {"blk.{}.ssm_in": f"{MIXER}in_proj_qkvz", "blk.{}.ssm_ba": f"{MIXER}in_proj_ba"},
    prefix="",
)
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "qwen3_next": MOE | {"intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10},
    "qwen3next": {},
}


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS[metadata.architecture])
    config = read_hybrid(metadata, experts=True, tiled=False)
    return with_experts(config, read_gated_experts(metadata, config), layers_with_experts(metadata, config))
