"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (arXiv:2307.09288, arXiv:2407.21783).

Covers architecture `llama` in GGUF files and transformers checkpoints: Llama 2 and 3, SmolLM2, Mistral 7B, TinyLlama,
Yi, and distilled models with that architecture. In GGUF files rotary pairs are adjacent elements, because the converter
reorders the rows of q and k.

Mixtral (arXiv:2401.04088) has experts instead of the MLP. Its architecture is `mixtral` in transformers checkpoints,
and `llama` in GGUF files.
"""

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Metadata
from engine.model_config import ModelConfig
from engine.models.decoder_config import EXPERT_COUNTS, IGNORED, STEMS, all_but_every, read_decoder, with_windows
from engine.models.expert_config import MIXTRAL_STEMS, STACKED, ExpertKeys, read_experts, with_experts

NAMES = Names(
    STEMS | MIXTRAL_STEMS,
    IGNORED,
    whole=STACKED | {"model.layers.{}.mlp.gate.weight": "blk.{}.ffn_gate_inp.weight"},
)

DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
    },
}


def read_config(metadata: Metadata) -> ModelConfig:
    """Return the configuration. Missing values get the defaults of transformers."""
    metadata = metadata.with_defaults(DEFAULTS[metadata.architecture])
    if metadata.architecture == "llama" and (metadata.is_config or not metadata.get(EXPERT_COUNTS[0])):
        return read_decoder(metadata, interleaved=True)
    config = read_decoder(metadata, interleaved=True, experts=True)
    if metadata.is_config:
        config = with_windows(metadata, config, all_but_every(0, len(config.layers)))
    return with_experts(config, read_experts(metadata, config, ExpertKeys()))
