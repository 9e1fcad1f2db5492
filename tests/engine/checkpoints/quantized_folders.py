"""Tiny Llama checkpoints with random quantized linear layers, for every quantization format, and float32 references."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.models.tiny_llama import make
from tests.quant.checkpoint_layers import (
    Layer,
    awq_layer,
    eight_bit_layer,
    four_bit_layer,
    gptq_layer,
    pack_quantized_layer,
)

Make = Callable[[np.random.Generator, int, int], Layer]

SCALE_FACTOR = 2.0**-5  # factor of all scales, so that activations do not grow from layer to layer
SCALES = ("scales", "weight_scale", "SCB", "weight.absmax", "weight_scale_inv")


def _float8(
    rng: np.random.Generator, rows: int, columns: int, block: tuple[int, int], config: dict[str, object], scale: str
) -> Layer:
    values = torch.from_numpy(rng.standard_normal((rows, columns))).to(torch.float8_e4m3fn)
    block_rows, block_columns = -(-rows // block[0]), -(-columns // block[1])
    factors = torch.from_numpy(rng.uniform(0.5, 4, (block_rows, block_columns))).float()
    expanded = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return Layer({"weight": values, scale: factors}, config, (values.float() * expanded).numpy())


_CHANNELS: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}
_BLOCKS: dict[str, object] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

KINDS: dict[str, Make] = {
    "GPTQ, groups": lambda rng, m, n: gptq_layer(rng, m, n, 32),
    "GPTQ v2, 8 bits, channels": lambda rng, m, n: gptq_layer(rng, m, n, None, 8, version=2),
    "GPTQ, desc_act": lambda rng, m, n: gptq_layer(rng, m, n, 32, ordered=True),
    "AWQ": lambda rng, m, n: awq_layer(rng, m, n, 32),
    "pack-quantized, symmetric": lambda rng, m, n: pack_quantized_layer(rng, m, n, 32),
    "pack-quantized, asymmetric": lambda rng, m, n: pack_quantized_layer(rng, m, n, 32, symmetric=False),
    "pack-quantized, 8 bits, channels": lambda rng, m, n: pack_quantized_layer(rng, m, n, None, 8),
    "pack-quantized, by activations": lambda rng, m, n: pack_quantized_layer(rng, m, n, 32, ordered=True),
    "NF4": lambda rng, m, n: four_bit_layer(rng, m, n, 32),
    "NF4, double quantization": lambda rng, m, n: four_bit_layer(rng, m, n, 32, nested=True, block_size=64),
    "FP4": lambda rng, m, n: four_bit_layer(rng, m, n, 32, "fp4"),
    "LLM.int8": eight_bit_layer,
    "FP8, channels": lambda rng, m, n: _float8(rng, m, n, (1, n), _CHANNELS, "weight_scale"),
    "FP8, blocks": lambda rng, m, n: _float8(rng, m, n, (128, 128), _BLOCKS, "weight_scale_inv"),
}


@dataclass(frozen=True)
class QuantizedFolder:
    """A checkpoint, and a transformers model with the same values in float32."""

    path: Path
    reference: PreTrainedModel


def quantized_folder(folder: Path, *kinds: str, layers: int = 3) -> QuantizedFolder:
    """Make a checkpoint whose linear layers have these formats in turn. The embedding and the head are bfloat16."""
    tiny = make(folder, heads=4, kv_heads=2, head_dim=32, hidden=64, layers=layers)
    path = folder / "checkpoint"
    tiny.reference.save_pretrained(path)
    rng, tensors, configs = np.random.default_rng(7), {}, _Configs()
    state = tiny.reference.state_dict()
    for name, values in state.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            tensors[name] = values.bfloat16()
            state[name] = values.bfloat16().float()
            continue
        layer = with_small_scales(KINDS[kinds[configs.count % len(kinds)]](rng, *values.shape))
        for rest, tensor in layer.tensors.items():
            # With several formats, scales are converted to one dtype: their random dtypes would distinguish the layers.
            converted = tensor.float() if tensor.is_floating_point() and len(kinds) > 1 else tensor
            tensors[f"{stem}.{rest}"] = converted.contiguous()
        state[name] = torch.from_numpy(layer.values)
        configs.add(stem, layer.config)
    tiny.reference.load_state_dict(state)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=configs.joined())
    return QuantizedFolder(path, tiny.reference)


class _Configs:
    """The quantization config: one config for all layers, or, in compressed-tensors, one group per scheme."""

    def __init__(self) -> None:
        self.count = 0
        self._layers: dict[str, list[str]] = defaultdict(list)  # config as JSON -> names of layers

    def add(self, layer: str, config: dict[str, object]) -> None:
        self.count += 1
        self._layers[json.dumps(config)].append(layer)

    def joined(self) -> dict[str, object]:
        config: dict[str, object] = json.loads(next(iter(self._layers)))
        if len(self._layers) > 1:
            groups = {}
            for number, (text, layers) in enumerate(self._layers.items()):
                groups[f"group_{number}"] = {**json.loads(text)["config_groups"]["group_0"], "targets": layers}
            config["config_groups"] = groups
        return config


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_small_scales(layer: Layer) -> Layer:
    """Multiply float scales by SCALE_FACTOR. Scales that are quantized themselves are small enough."""
    tensors: dict[str, Tensor] = dict(layer.tensors)
    factor = 1.0
    for name in SCALES:
        if name in tensors and tensors[name].is_floating_point():
            tensors[name] = tensors[name] * SCALE_FACTOR
            factor = SCALE_FACTOR
    return Layer(tensors, layer.config, layer.values * np.float32(factor))
