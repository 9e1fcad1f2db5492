"""The OLMo families: norms only after attention and MLP, and one norm for all heads of a token (arXiv:2501.00656).

OLMo 3 has windows in most layers, and the rope of those layers is never scaled. Architectures: `olmo2`, which GGUF
files of OLMo 3 also use, and `olmo3`. OLMoE, `olmoe`, has experts, and norms before attention and MLP
(arXiv:2409.02060).
"""

from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import HeadNorm, ModelConfig, NormPlacement
from engine.models.decoder_config import IGNORED, STEMS, WINDOW, all_but_every, read_decoder, with_windows
from engine.models.expert_config import EXPERT_STEMS, STACKED, ExpertKeys, read_experts, with_experts
from engine.models.rope_config import read_local_rope

NAMES = Names(
    {ours: theirs for ours, theirs in STEMS.items() if ours != "blk.{}.ffn_norm"}
    | {
        "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
    }
    | EXPERT_STEMS,
    IGNORED,
    whole=STACKED,
)
DEFAULTS: dict[str, dict[str, object]] = {
    "olmo2": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "olmo3": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "rope_theta": 500_000.0,
    },
    "olmoe": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
}
EXPERTS = ExpertKeys(normalized="norm_topk_prob")
CLIP = Key(Keys.Attention.CLAMP_KQV, "clip_qkv")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS[metadata.architecture])
    if metadata.architecture == "olmoe":
        return _read_olmoe(metadata)
    config = replace(read_decoder(metadata), norm_placement=NormPlacement.AFTER, head_norm=HeadNorm.ALL)
    if metadata.architecture == "olmo2" and (metadata.is_config or not metadata.get(WINDOW)):
        return config
    local = read_local_rope(metadata, config.attention.head_dim, config.ropes[0].base)
    config = replace(config, ropes=(*config.ropes, local))
    return with_windows(metadata, config, all_but_every(4, len(config.layers)), local_rope=1)


def _read_olmoe(metadata: Metadata) -> ModelConfig:
    metadata.require(CLIP)
    config = replace(read_decoder(metadata, experts=True), head_norm=HeadNorm.ALL)
    experts = read_experts(metadata, config, EXPERTS, normalized=False)
    return with_experts(config, experts)
