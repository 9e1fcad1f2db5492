"""gpt-oss: experts with biases and clamped gates, attention sinks, and windows in every other layer (arXiv:2508.10925).

Its YaRN does not round the bounds of the blended frequencies; GGUF files do not store that. In transformers checkpoints
(`gpt_oss`), the rows of gate and up alternate, and the matrices of experts are transposed unless they are MXFP4. GGUF
files have architecture `gpt-oss`.
"""

from dataclasses import replace

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import Gate, ModelConfig, YarnScaling
from engine.models.decoder_config import IGNORED, STEMS, read_decoder, with_windows
from engine.models.expert_config import ExpertKeys, read_experts, with_experts
from engine.models.rope_config import SECTIONS

LAYER = "model.layers.{}."
EXPERTS = f"{LAYER}mlp.experts."
EXPERT_STEMS = {f"{EXPERTS}gate_up_proj": "blk.{}.ffn_gate_up.{e}", f"{EXPERTS}down_proj": "blk.{}.ffn_down.{e}"}
NAMES = Names(
    STEMS | {"blk.{}.ffn_gate_inp": f"{LAYER}mlp.router"},
    IGNORED,
    whole={f"{LAYER}self_attn.sinks": "blk.{}.attn_sinks.weight"}
    | {theirs: f"{ours}.weight" for theirs, ours in EXPERT_STEMS.items()}
    | {
        f"{theirs}_{it}": f"{ours}.{it}" for theirs, ours in EXPERT_STEMS.items() for it in ("bias", "blocks", "scales")
    },
    transposed=True,
)
DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
GATE_VALUES = {Key("", "swiglu_alpha"): 1.702, Key("", "swiglu_limit"): 7.0}  # those of Gate.CLAMPED


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    if metadata.is_config and all(metadata.values.get(name) is None for name in SECTIONS):
        metadata = replace(metadata, values={**metadata.values, SECTIONS[0]: ROPE})
    for key, value in GATE_VALUES.items():
        metadata.require(key, value)
    config = replace(read_decoder(metadata, experts=True), gate=Gate.CLAMPED)
    layers = tuple(it.with_attention(lambda attention: replace(attention, sinks=True)) for it in config.layers)
    config = with_windows(metadata, replace(config, layers=layers), [it % 2 == 0 for it in range(len(layers))])
    (rope,) = config.ropes
    if isinstance(rope.scaling, YarnScaling) and not metadata.is_config:
        config = replace(config, ropes=(replace(rope, scaling=replace(rope.scaling, truncate=False)),))
    experts = read_experts(metadata, config, ExpertKeys())
    return with_experts(config, replace(experts, biased=True, interleaved=metadata.is_config))
