"""The Granite family: Llama's layers with four multipliers (`granite` in transformers).

Granite 3's model cards describe the multipliers. In GGUF files rotary pairs are adjacent elements, as for Llama.
Architectures with experts: `granitemoe`, and `granitemoeshared` with a shared MLP, which GGUF files call `granitemoe`.
"""

from dataclasses import replace

from gguf.constants import Keys

from engine.checkpoints.checkpoint import Names
from engine.checkpoints.metadata import Key, Metadata
from engine.model_config import ModelConfig
from engine.models.decoder_config import IGNORED, STEMS, read_decoder
from engine.models.expert_config import ExpertKeys, read_experts, with_experts

LAYER, SPARSE = "model.layers.{}.", "model.layers.{}.block_sparse_moe."
NAMES = Names(
    STEMS
    | {
        "blk.{}.ffn_gate_inp": f"{SPARSE}router.layer",
        "blk.{}.ffn_up_shexp": f"{LAYER}shared_mlp.input_linear",  # gate and up
        "blk.{}.ffn_down_shexp": f"{LAYER}shared_mlp.output_linear",
    },
    IGNORED,
    whole={
        f"{SPARSE}router.weight": "blk.{}.ffn_gate_inp.weight",
        f"{SPARSE}input_linear.weight": "blk.{}.ffn_gate_up.{e}.weight",
        f"{SPARSE}output_linear.weight": "blk.{}.ffn_down.{e}.weight",
        f"{SPARSE}experts.gate_up_proj": "blk.{}.ffn_gate_up.{e}.weight",
        f"{SPARSE}experts.down_proj": "blk.{}.ffn_down.{e}.weight",
    },
)

DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_multiplier": 1.0}
EXPERT_DEFAULTS: dict[str, object] = {"num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {
    "granitemoe": ExpertKeys(),
    "granitemoeshared": ExpertKeys(shared_hidden="shared_intermediate_size"),
}
EMBEDDING = Key(Keys.LLM.EMBEDDING_SCALE, "embedding_multiplier")
RESIDUAL = Key(Keys.LLM.RESIDUAL_SCALE, "residual_multiplier")
ATTENTION = Key(Keys.Attention.SCALE, "attention_multiplier")
LOGITS = Key(Keys.LLM.LOGIT_SCALE, "logits_scaling")  # divisor of the logits
FINETUNED = Key(Keys.Rope.SCALING_FINETUNED, "")


def read_config(metadata: Metadata) -> ModelConfig:
    keys = EXPERTS.get(metadata.architecture)
    metadata = metadata.with_defaults(DEFAULTS | (EXPERT_DEFAULTS if keys else {}))
    metadata.require(FINETUNED, True)
    config = read_decoder(metadata, interleaved=True, experts=keys is not None)
    if keys:  # transformers normalizes by a softmax of the chosen logits, which is equal
        config = with_experts(config, read_experts(metadata, config, keys))
    embedding, residual, logits = (
        metadata.number(key, 1.0, minimum=1e-4, maximum=1e4) for key in (EMBEDDING, RESIDUAL, LOGITS)
    )
    # The model multiplies everything that is added to the residual stream by `residual`. Here the stream is scaled by 1
    # / residual instead, and epsilons by 1 / residual**2. This is equivalent, because only norms read the stream, and
    # their results do not depend on its scale.
    return replace(
        config,
        embedding_scale=embedding / residual,
        norm=replace(config.norm, epsilon=config.norm.epsilon / residual**2),
        logit_scale=1 / logits,
        attention_scale=metadata.number(ATTENTION, config.attention.head_dim**-0.5, minimum=1e-6, maximum=1e3),
    )
