"""MiniMax M2: routing by sigmoids with a bias, and one norm for all heads of a token (`minimax_m2` in transformers).

A part of each head is rotated. GGUF files have architecture `minimax-m2`.
"""

from dataclasses import replace

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import HeadNorm, ModelConfig, Score
from engine.models.decoder_config import HEAD_DIM, IGNORED, STEMS, read_decoder
from engine.models.expert_config import MIXTRAL_STEMS, STACKED, ExpertKeys, read_experts, with_experts
from engine.models.rope_config import DIMENSIONS

LAYER = "model.layers.{}."
NAMES = Names(
    STEMS | MIXTRAL_STEMS,
    IGNORED,
    whole=STACKED
    | {f"{LAYER}mlp.gate.weight": "blk.{}.ffn_gate_inp.weight"}
    | {f"{LAYER}{it}.e_score_correction_bias": "blk.{}.exp_probs_b.bias" for it in ("block_sparse_moe", "mlp")},
)
DEFAULTS: dict[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
SCORING = Key("", "scoring_func")
ROTARY_DIM = Key("", "rotary_dim")  # an old spelling of `partial_rotary_factor`


def read_config(metadata: Metadata) -> ModelConfig:
    metadata = metadata.with_defaults(DEFAULTS)
    metadata.require(SCORING, Score.SIGMOID.value)
    if metadata.get(ROTARY_DIM) is not None:
        share = metadata.integer(ROTARY_DIM) / metadata.integer(HEAD_DIM)
        metadata = metadata.with_defaults({DIMENSIONS.config: share})
    config = replace(read_decoder(metadata, partial_rotary=True, experts=True), head_norm=HeadNorm.ALL)
    experts = read_experts(metadata, config, ExpertKeys(), score=Score.SIGMOID)
    return with_experts(config, experts)
