"""GLM 4.5 to 4.7 with experts: partial rotary embedding, and routing by sigmoids with a bias (arXiv:2508.06471).

The first layers have dense MLPs. The last layers of a file draft further tokens, and are not loaded. Architectures:
`glm4_moe` in transformers checkpoints, `glm4moe` in GGUF files.
"""

from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import HeadNorm, ModelConfig, Score
from engine.models.decoder_config import IGNORED, STEMS, read_decoder, without_drafts
from engine.models.expert_config import EXPERT_STEMS, SHARED_STEMS, STACKED, ExpertKeys, read_experts, with_experts

NAMES = Names(
    {ours: theirs for ours, theirs in STEMS.items() if ours != "blk.{}.ffn_norm"}
    | {"blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm"}
    | EXPERT_STEMS
    | SHARED_STEMS,
    IGNORED,
    whole=STACKED | {"model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias"},
)
DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
EXPERTS = ExpertKeys(
    hidden="moe_intermediate_size",
    normalized="norm_topk_prob",
    shared_count="n_shared_experts",
    scale="routed_scaling_factor",
    groups="n_group",
    active_groups="topk_group",
)
EPSILON = 1e-20  # added to the sum of an expert's weights, as in transformers
HEAD_NORMS = Key("", "use_qk_norm")
DENSE_LAYERS = Key(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, "first_k_dense_replace")
DRAFT_LAYERS = Key(Keys.LLM.NEXTN_PREDICT_LAYERS, "num_nextn_predict_layers")


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    config = read_decoder(metadata, partial_rotary=True, experts=True)
    config = replace(
        without_drafts(metadata, config, DRAFT_LAYERS),
        out_bias=False,
        head_norm=HeadNorm.EACH if metadata.flag(HEAD_NORMS, not metadata.is_config) else None,
        optional_head_norm=not metadata.is_config,
    )
    experts = read_experts(metadata, config, EXPERTS, score=Score.SIGMOID, normalized=metadata.is_config)
    experts = replace(experts, routing=replace(experts.routing, epsilon=EPSILON))
    dense = metadata.integer(DENSE_LAYERS, 0, minimum=0)
    return with_experts(config, experts, [number >= dense for number in range(len(config.layers))])
