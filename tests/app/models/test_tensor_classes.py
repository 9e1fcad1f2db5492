"""Classes of tensors: which one a tensor belongs to, and the size of each class."""

import re

import pytest

from app.models.tensor_classes import HeaderTensor, TensorClass, class_of, classes_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("token_embd.weight", "embedding"),
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("embeddings.word_embeddings.weight", "embedding"),
        ("output.weight", "head"),
        ("lm_head.weight", "head"),
        ("blk.0.attn_q.weight", "attention"),
        ("blk.0.attn_output.weight", "attention"),
        ("model.layers.3.self_attn.q_proj.qweight", "attention"),
        ("encoder.layer.0.attention.output.dense.weight", "attention"),
        ("blk.0.ffn_gate_exps.weight", "MLP"),
        ("model.layers.3.mlp.down_proj.weight", "MLP"),
        ("encoder.layer.0.output.dense.bias", "MLP"),
        ("blk.0.attn_norm.weight", "norms"),
        ("output_norm.weight", "norms"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("encoder.layer.0.output.LayerNorm.bias", "norms"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_class_is_derived_from_the_name(name: str, kind: str) -> None:
    assert class_of(name) == kind


def test_size_of_a_class_is_summed() -> None:
    tensors = [
        HeaderTensor("blk.0.ffn_up.weight", "Q4_1", (4, 32), 80),
        HeaderTensor("blk.0.ffn_down.weight", "F16", (32, 4), 256),
        HeaderTensor("blk.1.ffn_up.weight", "Q4_1", (4, 32), 80),
        HeaderTensor("token_embd.weight", "F16", (8, 4), 64),
    ]
    assert classes_of(tensors) == [
        TensorClass("embedding", {"F16": 64}, 1, 32, 64),
        TensorClass("MLP", {"F16": 256, "Q4_1": 160}, 3, 384, 416),
    ]


def test_ignored_tensors_are_a_class() -> None:
    tensors = [HeaderTensor(f"blk.{it}.ffn_up.weight", "F16", (2, 4), 16) for it in range(3)]
    assert classes_of(tensors, ignored=re.compile(r"blk\.2\..+")) == [
        TensorClass("MLP", {"F16": 32}, 2, 16, 32),
        TensorClass("unused", {"F16": 16}, 1, 8, 16),
    ]


@pytest.mark.parametrize(
    ("tensors", "bits"),
    [
        ([("qweight", "I32", (16, 64), 4096), ("qzeros", "I32", (1, 8), 32), ("scales", "F16", (1, 64), 128)], 4),
        ([("weight_packed", "I32", (64, 16), 4096), ("weight_scale", "BF16", (64, 1), 128)], 4),
        ([("weight", "U8", (4096, 1), 4096), ("weight.absmax", "U8", (128,), 128)], 4),
        ([("weight", "F8_E4M3", (64, 128), 8192), ("weight_scale_inv", "F32", (1, 1), 4)], None),
        ([("qweight", "I32", (32, 64), 8192), ("g_idx", "I32", (128,), 512)], 8),
    ],
)
def test_parameters_of_packed_weights_are_counted(
    tensors: list[tuple[str, str, tuple[int, ...], int]], bits: int | None
) -> None:
    """Each case has one matrix of 64 rows and 128 columns in the layout of a format."""
    prefix = "model.layers.0.mlp.up_proj."
    [part] = classes_of((HeaderTensor(prefix + name, *others) for name, *others in tensors), bits)  # type: ignore[arg-type]
    assert part.parameters == 64 * 128
    assert part.size == sum(tensor[3] for tensor in tensors)
