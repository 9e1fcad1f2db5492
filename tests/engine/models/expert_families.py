"""Tiny models with mixtures of experts, and the tensors and metadata that llama.cpp's converter writes for them."""

import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFValueType, GGUFWriter, RopeScalingType
from torch import Tensor, nn
from transformers import (
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    Lfm2MoeConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.engine.models.family import VOCABULARY, WINDOW, Family, GGUFForm, Write, granite, head_dim, rotary_dimensions

EXPERTS = 8
ACTIVE = 3

# -- metadata


def counts(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(config.num_experts_per_tok)


def width(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def both(*writes: Write) -> Write:
    def write(writer: GGUFWriter, config: PreTrainedConfig) -> None:
        for it in writes:
            it(writer, config)

    return write


def qwen2_moe(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def granite_shared(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def glm(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_dimension_count(rotary_dimensions(config))
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def ernie(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    # the converter does not use the width of an expert here, but for released models the result is the same
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def lfm2(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])


def lfm2_moe(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def delta_rules(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_rope_dimension_count(rotary_dimensions(config))


def gpt_oss(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    writer.add_expert_feed_forward_length(config.intermediate_size)


def whole_heads(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the layers without a window."""
    heads: PreTrainedConfig = config.per_layer_config[config.layer_types.index("full_attention")]
    return heads


def gemma4(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    local = [kind == "sliding_attention" for kind in config.layer_types]
    whole = whole_heads(config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(local)
    writer.add_key_length(whole.head_dim)
    writer.add_value_length(whole.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(whole.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if whole.num_key_value_heads != config.num_key_value_heads:
        heads = [config.num_key_value_heads if it else whole.num_key_value_heads for it in local]
        writer.add_key_value(f"{writer.arch}.attention.head_count_kv", heads, GGUFValueType.ARRAY)
    if config.use_double_wide_mlp:
        kept = config.num_hidden_layers - config.num_kv_shared_layers
        widths = [config.intermediate_size * (1 + (it >= kept)) for it in range(config.num_hidden_layers)]
        writer.add_key_value(f"{writer.arch}.feed_forward_length", widths, GGUFValueType.ARRAY)
    if config.enable_moe_block:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(config.top_k_experts)
        width(writer, config)


def gemma4_factors(config: PreTrainedConfig) -> Mapping[str, Tensor]:
    """Return the divisors of frequencies, which are very large for pairs that are not rotated."""
    pairs = whole_heads(config).head_dim // 2
    turning = torch.arange(pairs) < pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"]
    return {"rope_freqs.weight": torch.where(turning, 1.0, 1e30)}


def minimax(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(rotary_dimensions(config))


# -- tensors


def routers(model: PreTrainedModel) -> list[nn.Module]:
    return [it for it in model.modules() if type(it).__name__.lower().endswith("router")]


def balance_routers(model: PreTrainedModel) -> None:
    """Make every expert the choice of some tokens.

    Larger embeddings keep the inputs of routers apart, whose rows are then made orthogonal to the mean input.
    """

    def center(product: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean = inputs[0].flatten(0, -2).mean(0)
        weight = product.get_parameter("weight")
        weight.sub_(torch.outer(weight @ mean, mean) / mean.square().sum())

    products = (getattr(it, "proj", it) for it in routers(model))
    hooks = [it.register_forward_pre_hook(center) for it in products]
    if hooks:
        with torch.no_grad():
            model.get_input_embeddings().get_parameter("weight").mul_(5)
            model(torch.arange(VOCABULARY).unsqueeze(0))
    for hook in hooks:
        hook.remove()


# names in memory in transformers -> names of the Hub, which the converter reads
FUSED = re.compile(r"model\.layers\.\d+\.experts")  # modules of experts whose gate and up stay one tensor
HUB_NAMES = {
    "mlp.gate.moe_statics.": "mlp.moe_statics.",
    "mlp.e_score": "block_sparse_moe.e_score",
    "e_score_correction_bias": "e_score_correction.bias",
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.experts": "mlp.experts",
    "shared_mlp.input_linear.weight": "mlp.shared_experts.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
    "feed_forward.expert_bias": "feed_forward.expert_bias.bias",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "layer_scalar": "layer_scalar.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}


def hub_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the converter reads them: gate and up separate, and one tensor for all experts of a layer."""
    found: dict[str, Tensor] = {}
    for ours, values in (divided_gpt_oss(tensors) or tensors).items():
        name = reduce(lambda name, pair: name.replace(*pair), HUB_NAMES.items(), ours)
        module, _, last = name.rpartition(".")
        if last == "gate_up_proj" and not FUSED.fullmatch(module):
            gate, up = values.chunk(2, dim=-2)
            found |= {f"{module}.gate_proj.weight": gate, f"{module}.up_proj.weight": up}
        elif "e_score" in name:
            found[name] = values.flatten()
        else:
            found[f"{name}.weight" if last in ("gate_up_proj", "down_proj") else name] = values
    return found


def divided_gpt_oss(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of gpt-oss, with matrices that are not transposed, and gate and up separate.

    Empty for other families.
    """
    found: dict[str, Tensor] = {}
    if not any(name.endswith("gate_up_proj_bias") for name in tensors):
        return found
    for name, values in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            found[name] = torch.cat([values[..., 0::2], values[..., 1::2]], -1).mT
        elif name.endswith("experts.gate_up_proj_bias"):
            for number, part in enumerate(("gate", "up")):
                found[name.replace("gate_up_proj_bias", f"{part}_proj.bias")] = values[:, number::2]
        elif name.endswith("experts.down_proj"):
            found[name] = values.mT
        else:
            found[name.replace("down_proj_bias", "down_proj.bias").replace("attn.sinks", "attn.sinks.weight")] = values
    return found


# -- families

SHAPE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": ACTIVE}
QWEN = SHAPE | {"num_experts": EXPERTS}
LOCAL: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": ACTIVE}
GRANITE = LOCAL | {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
    "logits_scaling": 2.0,
    "rms_norm_eps": 1e-3,
}
GLM = SHAPE | {"n_routed_experts": EXPERTS, "routed_scaling_factor": 1.7, "num_nextn_predict_layers": 0}
# llama.cpp requires as many KV heads as heads
OLMOE: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": ACTIVE, "num_key_value_heads": 4}
ERNIE: dict[str, Any] = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "moe_k": ACTIVE,
    "moe_num_experts": EXPERTS,
}


QWEN35: dict[str, Any] = {
    "head_dim": 64,
    "linear_key_head_dim": 64,  # llama.cpp requires equal dimensions
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
QWEN3_NEXT = QWEN | QWEN35 | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 96, "initializer_range": 0.07}


GEMMA4: dict[str, Any] = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}


GEMMA4_FORM = GGUFForm("gemma4", gemma4, gemma4_factors)


def form(arch: str, *writes: Callable[[GGUFWriter, PreTrainedConfig], None], interleaved: bool = False) -> GGUFForm:
    return GGUFForm(arch, both(counts, *writes), interleaved_rows=interleaved)


EXPERT_FAMILIES: dict[str, Family] = {
    "qwen3 moe": Family(
        Qwen3MoeConfig, QWEN | {"head_dim": 64, "norm_topk_prob": True}, form("qwen3moe", head_dim, width)
    ),
    "qwen3 moe dense layers": Family(
        Qwen3MoeConfig, QWEN | {"head_dim": 64, "mlp_only_layers": [0], "num_hidden_layers": 4}
    ),
    "qwen2 moe": Family(
        Qwen2MoeConfig, QWEN | {"shared_expert_intermediate_size": 96}, form("qwen2moe", width, qwen2_moe)
    ),
    "mixtral moe": Family(MixtralConfig, LOCAL, form("llama", interleaved=True)),
    "olmoe": Family(OlmoeConfig, OLMOE, form("olmoe")),
    "olmoe with normalized weights": Family(OlmoeConfig, OLMOE | {"norm_topk_prob": True}),
    "granite moe": Family(GraniteMoeConfig, GRANITE, form("granitemoe", granite, interleaved=True)),
    "granite moe shared": Family(
        GraniteMoeSharedConfig,
        GRANITE | {"shared_intermediate_size": 64},
        form("granitemoe", granite, granite_shared, interleaved=True),
    ),
    "glm moe": Family(
        Glm4MoeConfig, GLM | {"attention_bias": True, "n_shared_experts": 2}, form("glm4moe", width, glm)
    ),
    "glm moe groups": Family(
        Glm4MoeConfig,
        GLM | {"use_qk_norm": True, "n_group": 4, "topk_group": 2, "head_dim": 64},
        form("glm4moe", head_dim, width, glm),
    ),
    "ernie moe": Family(Ernie4_5_MoeConfig, ERNIE, form("ernie4_5-moe", width, ernie)),
    "ernie moe no shared": Family(
        Ernie4_5_MoeConfig, ERNIE | {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4}
    ),
    "qwen3.5 moe": Family(
        Qwen3_5MoeTextConfig,
        QWEN | QWEN35 | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 96, "initializer_range": 0.07},
    ),
    # the GGUF file is that of an older converter, which does not divide the matrix of queries, keys, values, and gates
    "qwen3-next": Family(
        Qwen3NextConfig,
        QWEN3_NEXT,
        GGUFForm("qwen3next", both(counts, head_dim, width, qwen2_moe, delta_rules), norm_offset=1.0),
    ),
    "qwen3-next dense layers": Family(
        Qwen3NextConfig,
        QWEN3_NEXT
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 32, "mlp_only_layers": [0], "intermediate_size": 160}
        | {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]},
    ),
    "lfm2 moe": Family(
        Lfm2MoeConfig,
        QWEN
        | {
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
        form("lfm2moe", width, lfm2, lfm2_moe),
    ),
    "gpt-oss": Family(
        GptOssConfig,
        LOCAL
        | {
            "head_dim": 32,
            "num_attention_heads": 8,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
        form("gpt-oss", head_dim, gpt_oss),
    ),
    "gemma4 moe": Family(
        Gemma4TextConfig,
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": EXPERTS,
            "top_k_experts": ACTIVE,
            "moe_intermediate_size": 64,
        },
        GEMMA4_FORM,
        norm=0.5,
    ),
    "minimax moe": Family(
        MiniMaxM2Config,
        LOCAL | {"head_dim": 64, "rotary_dim": 32, "scoring_func": "sigmoid"},
        form("minimax-m2", head_dim, minimax),
    ),
}
