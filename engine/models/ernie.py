"""Ernie 4.5 with experts: routing with a bias, shared experts, and adjacent rotary pairs (`ernie4_5_moe` in
transformers).

GGUF files have architecture `ernie4_5-moe`.
"""

import re
from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import ModelConfig
from engine.models.decoder_config import IGNORED, STEMS, read_decoder
from engine.models.expert_config import EXPERT_STEMS, SHARED_STEMS, STACKED, ExpertKeys, read_experts, with_experts

CHOICE_BIAS = "moe_statics.e_score_correction_bias"
NAMES = Names(
    STEMS | EXPERT_STEMS | SHARED_STEMS,
    re.compile(rf"{IGNORED.pattern}|model\.mtp_.+"),  # also the modules that draft further tokens
    whole=STACKED | {f"model.layers.{{}}.mlp.{it}{CHOICE_BIAS}": "blk.{}.exp_probs_b.bias" for it in ("", "gate.")},
)
DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
EXPERTS = ExpertKeys(active="moe_k", hidden="moe_intermediate_size", shared_count="moe_num_shared_experts")
BIASES = Key("", "use_bias")
FIRST = Key(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, "moe_layer_start_index")
LAST = Key("", "moe_layer_end_index")
STEP = Key(Keys.LLM.INTERLEAVE_MOE_LAYER_STEP, "moe_layer_interval")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    metadata.require(BIASES, False)
    config = read_decoder(metadata, experts=True)
    (rope,) = config.ropes
    config = replace(config, ropes=(replace(rope, interleaved=True),))
    first, step = metadata.integer(FIRST, 0, minimum=0), metadata.integer(STEP, 1)
    last = metadata.integer(LAST, -1, minimum=-1)
    end = len(config.layers) if last == -1 else last + 1
    has_experts = [first <= number < end and (number + 1) % step == 0 for number in range(len(config.layers))]
    return with_experts(config, read_experts(metadata, config, EXPERTS), has_experts)
