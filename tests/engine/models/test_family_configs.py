"""Model configurations: defaults and old spellings as in transformers, and unsupported values."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine import models
from engine.checkpoints.metadata import Metadata
from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.mixer_config import ConvConfig, DeltaConfig
from engine.model_config import ModelConfig, YarnScaling
from tests.engine.answers import answer
from tests.engine.models.family_checkpoints import make

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
}
SHORT, LONG = [1.0 + number / 10 for number in range(32)], [2.0 + number for number in range(32)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ORIGINAL = "original_max_position_embeddings"
LISTED = ["full_attention", "sliding_attention"] * 6


def read(architecture: str, values: Mapping[str, object]) -> ModelConfig:
    return models.read_config(Metadata(values, architecture, is_config=True))


# -- missing keys and old spellings

GGUF_EXPERTS = (
    "qwen35moe",
    "qwen3next",
    "lfm2moe",
    "qwen2moe",
    "qwen3moe",
    "glm4moe",
    "ernie4_5-moe",
    "minimax-m2",
    "gpt-oss",
    "gemma4",
)

# architectures that have no own config.json: they occur in multimodal models or in GGUF files only
NOT_ALONE = ("qwen35", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma3_text", "mistral3", "command-r", *GGUF_EXPERTS)
SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, SIZES) for name in models.FAMILIES if name not in NOT_ALONE},
    "gemma3_text": ("gemma3_text", {}),
    "gemma4 values are keys": ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    "gemma4 experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    ),
    "old linear": ("llama", SIZES | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}),
    "old llama3": ("llama", SIZES | {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "rope_theta": 5e5}),
    "no scaling": ("llama", SIZES | {"rope_scaling": None, "rope_theta": 5e5, "num_key_value_heads": None}),
    "dynamic": ("llama", SIZES | {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 5e5}),
    "yarn without an original context": ("qwen2", SIZES | {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "no window": ("mistral", SIZES | {"sliding_window": None}),
    "a window as long as the context": ("mistral", SIZES | {"max_position_embeddings": 4096}),
    "first layers without a window": ("qwen3", SIZES | {"use_sliding_window": True, "max_window_layers": 5}),
    "listed layers": ("ministral", SIZES | {"layer_types": LISTED}),
    "interval": ("smollm3", SIZES | {"no_rope_layer_interval": 3}),
    "window without rope": ("smollm3", SIZES | {"use_sliding_window": True, "sliding_window": 512}),
    "two bases": (
        "gemma3_text",
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "no soft caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "full layers scaled": (
        "olmo3",
        SIZES
        | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2}}
        | {"max_position_embeddings": 65536},
    ),
    "su": (
        "phi3",
        SIZES
        | {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG} | {ORIGINAL: 8192}}
        | {"max_position_embeddings": 131072, ORIGINAL: 8192},
    ),
    "partial": ("phi3", SIZES | {"partial_rotary_factor": 0.75}),
    "every other layer has a window": (
        "qwen2_moe",
        SIZES | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 5},
    ),
    "all layers have windows": ("qwen3_moe", SIZES | {"use_sliding_window": True, "sliding_window": 512}),
    "window with experts": ("mixtral", SIZES | {"sliding_window": 512}),
    "dense layers": ("qwen3_moe", SIZES | {"mlp_only_layers": [1, 3], "decoder_sparse_step": 2}),
    "last layers dense": (
        "ernie4_5_moe",
        SIZES | {"moe_layer_start_index": 2, "moe_layer_end_index": 8, "moe_layer_interval": 2},
    ),
    "no shared experts": ("ernie4_5_moe", SIZES | {"moe_num_shared_experts": 0}),
    "no draft layers": ("glm4_moe", SIZES | {"num_nextn_predict_layers": 0}),
    "groups": ("glm4_moe", SIZES | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": True}),
    "old partial": ("minimax_m2", SIZES | {"rotary_dim": 64}),
    "normalized": ("olmoe", SIZES | {"norm_topk_prob": True}),
    "own scaling": ("gpt_oss", SIZES | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 8192}}),
    "shared": ("granitemoeshared", SIZES | {"shared_intermediate_size": 64}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SPELLINGS)
def test_config_equals_the_one_transformers_writes(name: str) -> None:
    """transformers reads the configuration and writes it back with every value in its newest form."""
    architecture, values = SPELLINGS[name]
    written = AutoConfig.for_model(architecture, **json.loads(json.dumps(values))).to_dict()
    assert read(architecture, values) == read(architecture, written)


def test_embedding_scale_has_the_precision_of_the_weights() -> None:
    exact, old, new = (read("gemma2", values) for values in ({}, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}))
    assert exact.embedding_scale == 2304**0.5
    assert old.embedding_scale == new.embedding_scale == torch.tensor(2304**0.5).bfloat16().item()


def test_position_scaled_queries_limit_the_context() -> None:
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
    scaled_queries = SIZES | {"rope_parameters": rope | {"llama_4_scaling_beta": 0.1}}
    assert read("ministral3", SIZES | {"rope_parameters": rope}).context_length == 262_144
    assert read("ministral3", scaled_queries).context_length == 16384


def test_text_config_inherits_keys_of_the_whole_config() -> None:
    whole = {"text_config": SIZES | {"model_type": "mistral"}, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    config = read("mistral3", whole)
    assert (config.architecture, config.tied_head) == ("mistral", True)


def test_contexts_beyond_the_original_use_long_factors() -> None:
    config = read("phi3", SPELLINGS["su"][1])
    assert [config.long_ropes(length) for length in (8192, 8193)] == [(False,), (True,)]


def test_command_r_context_is_model_max_length() -> None:
    assert read("cohere", SIZES).context_length == 8192
    assert read("cohere", SIZES | {"model_max_length": 131072}).context_length == 131072


def test_yarn_scaling_is_read_from_gguf_keys() -> None:
    values = gguf("mistral3") | {
        "mistral3.rope.scaling.type": "yarn",
        "mistral3.rope.scaling.factor": 16.0,
        "mistral3.rope.scaling.original_context_length": 1024,
        "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
    }
    scaling = models.read_config(Metadata(values, "mistral3")).ropes[0].scaling
    assert scaling == YarnScaling(16.0, 1024, mscale=1.0, mscale_all=1.0)


# -- unsupported values

UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"attention_bias": 1}, "attention_bias"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": {"rope_type": "bent"}}, "bent"),
    ("llama", {"rope_scaling": {"type": ["linear"]}}, "rope_type"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
    ("llama", {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 64.0}}, "beta_slow"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor"),
    ("llama", {"rope_theta": 1.0}, "rope_theta"),
    ("qwen2", {"hidden_act": "relu"}, "hidden_act"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 12}, "chunked_attention"),
    ("qwen2", {"use_sliding_window": True, "layer_types": LISTED[1:]}, "11 layer types"),
    ("qwen3", {"num_experts": 128}, "num_experts"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("gemma2", {"torch_dtype": 16}, "torch_dtype"),
    ("gemma2", {"sliding_window": -1}, "sliding_window"),
    ("gemma2", {"attn_logit_softcapping": "hard"}, "attn_logit_softcapping"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"sliding_window_pattern": "often"}, "sliding_window_pattern"),
    ("gemma3_text", {"rope_local_base_freq": 0.0}, "rope_local_base_freq"),
    ("gemma3", {"text_config": {"model_type": "mamba"}}, "mamba"),
    ("gemma3", {"text_config": {"model_type": 3}}, "model_type"),
    ("mistral3", {"text_config": {"model_type": "ministral"}}, "hidden_size"),
    ("mistral", {"sliding_window": 4096.5}, "sliding_window"),
    ("granite", {"residual_multiplier": 0.0}, "residual_multiplier"),
    ("granite", {"logits_scaling": True}, "logits_scaling"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [2] * 12}, "no_rope_layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ("olmo2", {"hidden_act": "gelu"}, "hidden_act"),
    ("olmo3", {"layer_types": "sliding_attention"}, "layer_types"),
    ("phi3", {"partial_rotary_factor": 0.27}, "partial_rotary_factor"),
    ("qwen2", {"rope_parameters": [1]}, "rope_parameters"),
    ("qwen2", {"rope_scaling": "x"}, "rope_scaling"),
    ("qwen2", {"layer_types": "x"}, "layer_types"),
    ("qwen2", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("qwen2", {"torch_dtype": "float4711"}, "torch_dtype"),
    ("qwen2", {"rope_theta": float("nan")}, "rope_theta"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG[1:]}}, "long_factor"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [0.0], "long_factor": LONG}}, "short_factor"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [], "long_factor": []}}, "short_factor"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": 1.0, "long_factor": LONG}}, "short_factor"),
    ("phi3", {"original_max_position_embeddings": 1, "rope_scaling": {"type": "su"}}, "original_max_position"),
    ("cohere", {"logit_scale": 0.0}, "logit_scale"),
    ("cohere", {"layer_norm_eps": 0}, "layer_norm_eps"),
    ("cohere", {"model_max_length": 0}, "model_max_length"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual"),
    ("stablelm", {"use_qkv_bias": "yes"}, "use_qkv_bias"),
    ("lfm2", {"conv_bias": True}, "conv_bias"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
    ("lfm2", {"layer_types": ["conv"] * 12}, "layer_types"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer_types"),
    ("lfm2", {"layer_types": ["mamba"] * 12}, "mamba"),
    ("lfm2", {"full_attn_idxs": []}, "full_attn_idxs"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of"),
    ("lfm2_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
]


@pytest.mark.parametrize(("architecture", "changes", "named"), UNSUPPORTED)
def test_unsupported_config_values_are_refused(architecture: str, changes: dict[str, Any], named: str) -> None:
    plain = {} if "text_config" in changes else SIZES
    if plain:
        read(architecture, plain)
    with pytest.raises(UnsupportedModel, match=named):
        read(architecture, plain | changes)


def gguf(architecture: str) -> dict[str, Any]:
    sizes = {"block_count": 12, "context_length": 4096, "embedding_length": 256, "feed_forward_length": 96}
    heads = {"attention.head_count": 4, "vocab_size": 1000, "logit_scale": 1.0}
    epsilons = {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5}
    return {f"{architecture}.{key}": value for key, value in (sizes | heads | epsilons).items()}


UNSUPPORTED_IN_GGUF: list[tuple[str, str, object]] = [
    ("qwen2", "attention.causal", False),
    ("qwen3", "expert_count", 128),
    ("gemma3", "rope.freq_base_swa", -1.0),
    ("phi3", "rope.dimension_count", 66),
    ("phi3", "rope.dimension_count", 31),
    ("phi3", "rope.scaling.attn_factor", 0.0),
    ("granite", "rope.scaling.finetuned", False),
    ("granite", "attention.scale", 0.0),
    ("mistral3", "attention.temperature_scale", "warm"),
    ("mistral3", "rope.scaling.type", "bent"),
    ("smollm3", "rope.dimension_count", 32),
    ("smollm3", "rope.scale_linear", 0.5),
    ("olmo2", "attention.sliding_window", -5),
    ("command-r", "logit_scale", 0.0),
    ("stablelm", "attention.layer_norm_epsilon", 2.0),
    ("stablelm", "rope.dimension_count", 31),
]


@pytest.mark.parametrize(("architecture", "key", "value"), UNSUPPORTED_IN_GGUF)
def test_unsupported_gguf_values_are_refused(architecture: str, key: str, value: object) -> None:
    plain = gguf(architecture)
    models.read_config(Metadata(plain, architecture))
    with pytest.raises(UnsupportedModel, match=key.replace(".", r"\.")):
        models.read_config(Metadata(plain | {f"{architecture}.{key}": value}, architecture))


def test_family_modules_do_not_import_torch() -> None:
    imports = "\n".join(f"import {name}" for name in set(models.FAMILIES.values()))
    code = f"import sys\n{imports}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True)


@pytest.mark.parametrize("pattern", [(True, False), (1, 0), "often"])
def test_invalid_window_pattern_is_refused(pattern: object) -> None:
    window = {"gemma3.attention.sliding_window": 512, "gemma3.attention.sliding_window_pattern": pattern}
    with pytest.raises(UnsupportedModel, match=r"sliding_window_pattern|2 layer types"):
        models.read_config(Metadata(gguf("gemma3") | window, "gemma3"))


@pytest.mark.parametrize("heads", [4, (0,) * 12, (0, 4), (0, 4, 2) * 4])
def test_kv_heads_of_convolutions_are_refused_unless_attention_layers_agree(heads: object) -> None:
    values = gguf("lfm2") | {"lfm2.shortconv.l_cache": 3}
    plain = models.read_config(Metadata(values | {"lfm2.attention.head_count_kv": (0, 2) * 6}, "lfm2"))
    assert [isinstance(layer.mixer, ConvConfig) for layer in plain.layers] == [True, False] * 6
    with pytest.raises(UnsupportedModel, match="head_count_kv"):
        models.read_config(Metadata(values | {"lfm2.attention.head_count_kv": heads}, "lfm2"))


def delta_values(layers: int) -> dict[str, object]:
    """Return the metadata of a GGUF file with gated delta rules."""
    ssm = {"conv_kernel": 4, "state_size": 32, "group_count": 2, "time_step_rank": 6, "inner_size": 192}
    more = {f"qwen35.ssm.{key}": value for key, value in ssm.items()}
    return gguf("qwen35") | more | {"qwen35.block_count": layers}


def test_draft_layers_of_hybrid_models_are_left_out() -> None:
    listed = (True, False, True, False, False)
    drafts = {"qwen35.nextn_predict_layers": 1, "qwen35.attention.recurrent_layers": listed}
    config = models.read_config(Metadata(delta_values(5) | drafts, "qwen35"))
    assert [isinstance(layer.mixer, DeltaConfig) for layer in config.layers] == [True, False, True, False]
    assert config.draft_layers == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ssm.group_count", 4),
        ("ssm.inner_size", 190),
        ("ssm.conv_kernel", 1),
        ("attention.recurrent_layers", (True, False)),
        ("attention.recurrent_layers", (True,) * 4),
    ],
)
def test_unsupported_delta_rules_are_refused(key: str, value: object) -> None:
    models.read_config(Metadata(delta_values(4), "qwen35"))
    with pytest.raises(UnsupportedModel):
        models.read_config(Metadata(delta_values(4) | {f"qwen35.{key}": value}, "qwen35"))


def test_disabled_yarn_extension_is_refused() -> None:
    rope = {"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.0}
    values = {f"qwen2.rope.scaling.{key}": value for key, value in rope.items()}
    with pytest.raises(UnsupportedModel, match="yarn_ext_factor"):
        models.read_config(Metadata(gguf("qwen2") | values, "qwen2"))


# -- tensors


def test_redundant_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    """The checkpoint stores a head of zeros, but its configuration ties the head to the embedding. The stored head must
    be ignored.
    """
    make(tmp_path, "qwen2 tied", "folder")
    options, path = LoadOptions("reference", 64, threads=1), tmp_path / "model.safetensors"
    expected_answer = answer(tmp_path, options)
    tensors = load_file(path)
    frequencies = {f"model.layers.{number}.self_attn.rotary_emb.inv_freq": torch.zeros(16) for number in range(3)}
    save_file(tensors | frequencies | {"lm_head.weight": torch.zeros(97, 128)}, path)
    assert answer(tmp_path, options) == expected_answer
