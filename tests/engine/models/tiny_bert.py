"""Tiny random BERT checkpoints: a transformers model, its folder, and the converted GGUF file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, BertModel

from engine.checkpoints.checkpoint import Names
from engine.models.bert import NAMES, RANKING_NAMES

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down", "token_embd")
# GGML types of the matrices in a file, by tensor name within a layer. All others are F32.
MIXES: dict[str, dict[str, str]] = {
    "F32": {},
    "F16": dict.fromkeys(MATRICES, "F16"),
    "Q8_0": dict.fromkeys(MATRICES, "Q8_0") | {"attn_v": "F16", "ffn_down": "F32"},
}


@dataclass(frozen=True)
class TinyBert:
    """A transformers model and the same weights in a folder and a GGUF file, which may be quantized."""

    reference: BertModel
    folder: Path
    path: Path  # path of the GGUF file

    def states(self, ids: Sequence[int]) -> Tensor:
        """Return the states that transformers computes, float32 [tokens, hidden]."""
        with torch.inference_mode():
            states: Tensor = self.reference(torch.tensor([list(ids)])).last_hidden_state[0]
        return states


def make(
    folder: Path,
    *,
    hidden: int = 64,
    heads: int = 4,
    mlp: int = 96,
    vocab: int = 97,
    positions: int = 48,
    types: Mapping[str, str] | None = None,
    pooling: str | None = None,
    metadata: Mapping[str, object] | None = None,
    seed: int = 0,
) -> TinyBert:
    """Make a model of 3 layers with weights large enough that the vectors of different texts differ.

    `types`: one of MIXES, or a dictionary like them. `pooling`: a flag of sentence-transformers; None: the folder has
    no pooling files. `metadata`: additional keys for the GGUF file.
    """
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=3,
        num_attention_heads=heads,
        intermediate_size=mlp,
        max_position_embeddings=positions,
        initializer_range=0.2,
    )
    model = BertModel(config).train(mode=False)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith(".bias") or "LayerNorm" in name:  # these parameters are constant in a new model
                values.add_(0.2 * torch.randn_like(values))
    model.save_pretrained(folder)
    if pooling is not None:
        write_modules(folder, {pooling: True})
    kind = None if pooling is None else _POOLING_TYPES[pooling]
    _write(folder / "tiny.gguf", config, model.state_dict(), NAMES, types or {}, kind, metadata or {})
    return TinyBert(model, folder, folder / "tiny.gguf")


def make_ranking(
    folder: Path, *, vocab: int = 97, labels: int = 1, metadata: Mapping[str, object] | None = None
) -> tuple[BertForSequenceClassification, Path]:
    """Make a tiny cross-encoder as a folder and as a GGUF file."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=48,
        initializer_range=0.2,
        id2label={number: str(number) for number in range(labels)},  # determines the number of labels in transformers
    )
    model = BertForSequenceClassification(config).train(mode=False)
    with torch.no_grad():
        for values in model.parameters():
            values.add_(0.05 * torch.randn_like(values))
    model.save_pretrained(folder)
    state = {name.removeprefix("bert."): values for name, values in model.state_dict().items()}
    _write(folder / "tiny.gguf", config, state, RANKING_NAMES, {}, gguf.PoolingType.RANK, metadata or {})
    return model, folder / "tiny.gguf"


def write_modules(folder: Path, pooling: Mapping[str, object], kinds: Sequence[str] = ("Normalize",)) -> None:
    """Write the files of sentence-transformers that describe pooling."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": index, "name": str(index), "path": paths.get(kind, f"{index}_{kind}"), "type": f"library.models.{kind}"}
        for index, kind in enumerate(("Transformer", "Pooling", *kinds))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))


_POOLING_TYPES = {
    "pooling_mode_mean_tokens": gguf.PoolingType.MEAN,
    "pooling_mode_cls_token": gguf.PoolingType.CLS,
    "pooling_mode_lasttoken": gguf.PoolingType.LAST,
}
_VALUE_TYPES = {
    str: gguf.GGUFValueType.STRING,
    int: gguf.GGUFValueType.UINT32,
    tuple: gguf.GGUFValueType.ARRAY,
}


def _write(
    path: Path,
    config: BertConfig,
    state: Mapping[str, Tensor],
    names: Names,
    types: Mapping[str, str],
    pooling: int | None,
    metadata: Mapping[str, object],
) -> None:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_vocab_size(config.vocab_size)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    for key, value in metadata.items():
        writer.add_key_value(key, value, _VALUE_TYPES[type(value)])
    for ours, theirs in names.stems.items():
        for number in range(config.num_hidden_layers if "{}" in ours else 1):
            for part in ("weight", "bias"):
                values = state.get(f"{theirs.format(number)}.{part}")
                if values is None:
                    continue
                matrix = part == "weight" and values.ndim == 2
                kind = gguf.GGMLQuantizationType[types.get(ours.split(".")[-1], "F32") if matrix else "F32"]
                data = gguf.quantize(values.contiguous().numpy(), kind)
                writer.add_tensor(f"{ours.format(number)}.{part}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
