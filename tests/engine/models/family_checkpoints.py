"""Tiny random checkpoints of every decoder family: a transformers model, its folder, and the converted GGUF file.

Tensor names come from the table of llama.cpp's converter in the `gguf` package.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFWriter, RopeScalingType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

from tests.engine.models.expert_families import (
    EXPERT_FAMILIES,
    GEMMA4,
    GEMMA4_FORM,
    QWEN35,
    balance_routers,
    hub_tensors,
    lfm2,
)
from tests.engine.models.family import (
    ORIGINAL,
    SHAPE,
    VOCABULARY,
    WINDOW,
    Family,
    GGUFForm,
    full_rope,
    granite,
    head_dim,
    rotary_dimensions,
)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# -- metadata that the converter writes in addition to the shape


def linear(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(full_rope(config)["factor"])


def yarn(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    rope = full_rope(config)
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    for name, add in (
        ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
        ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
        ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ("mscale_all_dim", writer.add_rope_scaling_yarn_log_mul),
        ("llama_4_scaling_beta", writer.add_attn_temperature_scale),
    ):
        if rope.get(name) is not None:
            add(rope[name])


def ministral3(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim(writer, config)
    yarn(writer, config)


def gemma2(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if "factor" in full_rope(config):
        linear(writer, config)


def olmo3(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    yarn(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def phi3(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_dimension_count(rotary_dimensions(config))
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in config.rope_parameters:
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        factor = math.sqrt(1 + math.log(scale) / math.log(config.original_max_position_embeddings))
        writer.add_rope_scaling_attn_factors(factor)


def cohere(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def stablelm(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_rope_dimension_count(rotary_dimensions(config))
    writer.add_parallel_residual(True)  # the converter's default for configurations without the key


# -- tensors that the converter computes from the configuration


def llama3_factors(config: PreTrainedConfig) -> Mapping[str, Tensor]:
    rope, dims = full_rope(config), rotary_dimensions(config)
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, dims, 2) / dims)
    original, low, high = (
        rope[it] for it in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    smooth = (original / wavelengths - low) / (high - low)
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(wavelengths < original / high, 1.0, factors)
    return {"rope_freqs.weight": torch.where(wavelengths > original / low, rope["factor"], factors)}


def long_factors(config: PreTrainedConfig) -> Mapping[str, Tensor]:
    names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    return {ours: torch.tensor(config.rope_parameters[theirs]) for ours, theirs in names.items()}


# -- families


LLAMA = GGUFForm("llama", interleaved_rows=True)
COMMAND_R = GGUFForm("command-r", cohere, layer_norm=True)
STABLELM = GGUFForm("stablelm", stablelm, layer_norm=True)
GEMMA: dict[str, Any] = {"head_dim": 64, "num_hidden_layers": 4, "sliding_window": WINDOW}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * number for number in range(16)],
    "long_factor": [1.5 + 0.7 * number for number in range(16)],
}
PARTIAL = LONGROPE | {
    "partial_rotary_factor": 0.75,
    "short_factor": LONGROPE["short_factor"][:12],
    "long_factor": LONGROPE["long_factor"][:12],
}
LFM2: dict[str, Any] = {"block_auto_adjust_ff_dim": False}
FAMILIES: dict[str, Family] = EXPERT_FAMILIES | {
    "qwen2": Family(Qwen2Config, {}, GGUFForm("qwen2")),
    "qwen2 tied": Family(Qwen2Config, {"tie_word_embeddings": True}, GGUFForm("qwen2")),
    "qwen2 window": Family(Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2 yarn": Family(Qwen2Config, {"rope_parameters": YARN}, GGUFForm("qwen2", yarn)),
    "qwen3": Family(Qwen3Config, {"head_dim": 64}, GGUFForm("qwen3", head_dim)),
    "qwen3 biases": Family(Qwen3Config, {"head_dim": 64, "attention_bias": True}),
    "qwen3 listed windows": Family(
        Qwen3Config,
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "gemma2": Family(
        Gemma2Config,
        GEMMA
        | {
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        GGUFForm("gemma2", gemma2, norm_offset=1.0),
        norm=0.0,
    ),
    "gemma2 scalar": Family(Gemma2Config, GEMMA | {"query_pre_attn_scalar": 30}, norm=0.0),
    "gemma3": Family(
        Gemma3TextConfig,
        GEMMA | {"num_hidden_layers": 7, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
        GGUFForm("gemma3", gemma3, norm_offset=1.0),
        norm=0.0,
    ),
    "gemma3 linear": Family(
        Gemma3TextConfig,
        GEMMA
        | {
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        GGUFForm("gemma3", gemma3, norm_offset=1.0),
        norm=0.0,
    ),
    "gemma3 listed layers": Family(
        Gemma3TextConfig,
        GEMMA | {"num_hidden_layers": 3, "layer_types": MIXED, "final_logit_softcapping": 4.0},
        norm=0.0,
    ),
    "gemma4": Family(Gemma4TextConfig, GEMMA4 | {"hidden_size_per_layer_input": 0}, GEMMA4_FORM, norm=0.5),
    "gemma4 values are keys": Family(
        Gemma4TextConfig,
        GEMMA4 | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        GEMMA4_FORM,
        norm=0.5,
    ),
    "gemma4 embeddings per layer": Family(
        Gemma4TextConfig,
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        GEMMA4_FORM,
        norm=0.5,
    ),
    "llama": Family(LlamaConfig, {"head_dim": 64}, GGUFForm("llama", head_dim, interleaved_rows=True)),
    "llama biases": Family(LlamaConfig, {"attention_bias": True}, LLAMA),
    "llama linear": Family(
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        GGUFForm("llama", linear, interleaved_rows=True),
    ),
    "llama3": Family(
        LlamaConfig,
        {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}},
        GGUFForm("llama", tensors=llama3_factors, interleaved_rows=True),
    ),
    "llama dynamic": Family(
        LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
    ),
    "llama yarn": Family(
        LlamaConfig,
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}},
        GGUFForm("llama", yarn, interleaved_rows=True),
    ),
    "llama yarn scales": Family(
        LlamaConfig, {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}}
    ),
    "mistral": Family(MistralConfig, {"sliding_window": None}, LLAMA),
    "mistral window": Family(MistralConfig, {"sliding_window": WINDOW, "head_dim": 64}),
    "ministral": Family(MinistralConfig, {"sliding_window": WINDOW, "head_dim": 32, "layer_types": MIXED}),
    "ministral3": Family(
        Ministral3Config,
        {
            "head_dim": 32,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 256, "factor": 2.0, "llama_4_scaling_beta": 0.1}
            | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
        GGUFForm("mistral3", ministral3, interleaved_rows=True),
    ),
    "smollm3": Family(
        SmolLM3Config, {"num_hidden_layers": 5, "tie_word_embeddings": True}, GGUFForm("smollm3", interleaved_rows=True)
    ),
    "smollm3 listed": Family(
        SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "granite": Family(
        GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
            "logits_scaling": 8.0,
            "rms_norm_eps": 1e-3,
        },
        GGUFForm("granite", granite, interleaved_rows=True),
    ),
    "olmo2": Family(Olmo2Config, {}, GGUFForm("olmo2")),
    "olmo3": Family(
        Olmo3Config,
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        GGUFForm("olmo2", olmo3),
    ),
    "phi3": Family(Phi3Config, {"sliding_window": WINDOW}, GGUFForm("phi3", phi3)),
    "phi3 longrope": Family(
        Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        GGUFForm("phi3", phi3, long_factors),
    ),
    "phi4 mini": Family(
        Phi3Config,
        {"rope_parameters": PARTIAL, "original_max_position_embeddings": ORIGINAL, "tie_word_embeddings": True},
        GGUFForm("phi3", phi3, long_factors),
    ),
    "qwen3.5": Family(Qwen3_5TextConfig, QWEN35 | {"num_hidden_layers": 4}),
    "qwen3.5 equal heads": Family(
        Qwen3_5TextConfig,
        QWEN35
        | {
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        }
        | {"num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "lfm2": Family(
        Lfm2Config,
        LFM2 | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
        GGUFForm("lfm2", lfm2),
    ),
    "lfm2 adjusted MLP": Family(
        Lfm2Config,
        {"block_multiple_of": 64, "conv_L_cache": 4, "full_attn_idxs": [1], "tie_word_embeddings": True},
    ),
    "cohere": Family(CohereConfig, {"logit_scale": 0.25, "tie_word_embeddings": True}, COMMAND_R),
    "cohere normalized heads": Family(
        CohereConfig,
        {"use_qk_norm": True, "attention_bias": True, "layer_norm_eps": 1e-3, "tie_word_embeddings": True},
        COMMAND_R,
    ),
    "stablelm": Family(StableLmConfig, {"layer_norm_eps": 1e-3}, STABLELM),
    "stablelm parallel": Family(
        StableLmConfig, {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5}, STABLELM
    ),
}


# -- making checkpoints


@dataclass(frozen=True)
class TinyModel:
    """A transformers model, and the same weights in a checkpoint."""

    reference: PreTrainedModel
    path: Path  # a folder, or a GGUF file


def make(folder: Path, name: str, source: str) -> TinyModel:
    """Make a checkpoint; `source` is "folder", "gguf", or "fused".

    "fused" is a folder with one tensor for all experts of a layer.
    """
    family = FAMILIES[name]
    model = random_model(family, sum(name.encode()))
    if source == "fused":
        model.config.save_pretrained(folder)
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
        tensors = {name: values for name, values in model.state_dict().items() if name not in tied}
        save_file(tensors, folder / "model.safetensors")
        return TinyModel(model, folder)
    if source == "folder":
        model.save_pretrained(folder)
        return TinyModel(model, folder)
    assert family.gguf
    return TinyModel(model, write_gguf(folder / "tiny.gguf", model, family.gguf))


def random_model(family: Family, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = family.config(**{**SHAPE, **family.options})
    config.allow_global_per_layer_attribute_access = True
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model.train(mode=False)
    randomize(model, family.norm)
    balance_routers(model)
    return model


def make_normalized_stablelm(path: Path) -> TinyModel:
    """Make a StableLM with head norms as a GGUF file; folders with head norms are not supported."""
    options = {"qk_layernorm": True, "use_parallel_residual": True}
    model = random_model(Family(StableLmConfig, options), seed=6)
    return TinyModel(model, write_gguf(path, model, STABLELM))


def make_two_norms(folder: Path) -> TinyModel:
    """Make a parallel StableLM with a second norm per layer, for the MLP, equal to the first."""
    tiny = make(folder, "stablelm parallel", "folder")
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if "input_layernorm" in name]
    second = {name.replace("input", "post_attention"): weights[name].clone() for name in names}
    save_file(weights | second, folder / "model.safetensors")
    return tiny


def make_wrapped_gemma(folder: Path) -> TinyModel:
    """Make a multimodal Gemma 3 with a vision tower."""
    torch.manual_seed(5)
    text = SHAPE | GEMMA | {"tie_word_embeddings": True}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    model = Gemma3ForConditionalGeneration(config).train(mode=False)
    randomize(model, 0.0)
    model.save_pretrained(folder)
    return TinyModel(model, folder)


def make_wrapped_gemma4(folder: Path) -> TinyModel:
    """Make a multimodal Gemma 4 with a vision tower and an audio tower."""
    torch.manual_seed(15)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SHAPE, **FAMILIES["gemma4 embeddings per layer"].options, "pad_token_id": 0}
    vision = small | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=small | {"output_proj_dims": 32})
    model = Gemma4ForConditionalGeneration(config).train(mode=False)
    model.config.get_text_config().allow_global_per_layer_attribute_access = True
    randomize(model, 0.5)
    model.save_pretrained(folder)
    return TinyModel(model, folder)


def make_wrapped_qwen(folder: Path) -> TinyModel:
    """Make a multimodal Qwen 3.5 with a vision tower and a layer that drafts tokens."""
    torch.manual_seed(9)
    text = SHAPE | QWEN35 | {"num_hidden_layers": 4}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    config = Qwen3_5Config(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    model = Qwen3_5ForConditionalGeneration(config).train(mode=False)
    randomize(model, 1.0)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"mtp.fc.weight": torch.ones(128, 256)}, folder / "model.safetensors")
    return TinyModel(model, folder)


def randomize(model: PreTrainedModel, norm: float) -> None:
    """Randomize norm weights and biases, which are constant in a new model. Those of routers may be buffers."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):  # large, so that some gates reach their limit
                values.normal_(0.0, 4.0)
            elif values.dim() == 1 or "norm" in name or name.endswith("_bias"):
                values.normal_(norm if "norm" in name else float(name.endswith("scale")), 0.3)
        for name, values in model.state_dict().items():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                values.normal_(0.0, 0.05)
            elif name.endswith("layer_scalar"):
                values.uniform_(0.5, 1.5)


def write_gguf(path: Path, model: PreTrainedModel, form: GGUFForm, *, stacked: bool = True) -> Path:
    """Write a GGUF file. `stacked`: whether it has one tensor for all experts of a layer, or one per expert."""
    config = model.config
    writer = GGUFWriter(path, form.arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if form.layer_norm:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(full_rope(config)["rope_theta"])
    writer.add_token_list([f"token {number}" for number in range(config.vocab_size)])
    form.write(writer, config)
    for name, values in form.tensors(config).items():
        writer.add_tensor(name, values.float().numpy())
    names = gguf.get_tensor_name_map(architecture(form.arch), config.num_hidden_layers)
    for name, values in hub_tensors(stack_head_norms(model.state_dict())).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert ours, name
        converted = convert(name, values, config, form)
        parts = {ours: converted} if stacked else divided(ours, converted)
        for part, value in parts.items():
            writer.add_tensor(part, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def divided(name: str, values: Tensor) -> dict[str, Tensor]:
    """Return the matrices of a tensor that stacks those of all experts, with the names of older files."""
    if "_exps" not in name:
        return {name: values}
    return {name.replace("_exps", f".{number}"): values[number] for number in range(len(values))}


def stack_head_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of head norms, one tensor per head, into one tensor."""
    found: dict[str, list[Tensor]] = {}
    for name, values in tensors.items():
        module, is_head, _ = name.partition(".norms.")
        found.setdefault(f"{module}.weight" if is_head else name, []).append(values)
    return {name: torch.stack(values) if len(values) > 1 else values[0] for name, values in found.items()}


def architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, theirs in gguf.MODEL_ARCH_NAMES.items() if theirs == name)


def convert(name: str, values: Tensor, config: PreTrainedConfig, form: GGUFForm) -> Tensor:
    module = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
    if form.interleaved_rows and heads:
        return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if name.endswith("A_log"):
        return -values.exp()
    if name.endswith("conv1d.weight"):
        return values.squeeze(1)
    has_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return values + form.norm_offset if has_offset else values
