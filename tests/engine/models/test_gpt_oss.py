"""gpt-oss: folders with MXFP4 experts, parts of the model that its logits depend on, and the gates' limits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import UnsupportedModel
from quant.errors import ModelFileError
from tests.engine.checkpoints.quantized_folders import edit_config
from tests.engine.models.expert_families import EXPERTS
from tests.engine.models.family_checkpoints import make
from tests.engine.models.test_experts import Recording, mixtures, our_logits, their_logits

LAYER = "model.layers.{}.mlp.experts.{}"


def packed(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random MXFP4 matrices of all experts: codes, and scales that give values of about 0.1."""
    codes = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 124, (EXPERTS, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return codes, scales


def write_mxfp4(folder: Path, model: PreTrainedModel) -> None:
    """Replace the experts of a folder and of its model by MXFP4 matrices with the same values."""
    chance, config = torch.Generator().manual_seed(3), model.config
    stored = load_file(folder / "model.safetensors")
    shapes = {
        "gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }
    for number, experts in enumerate(mixtures(model)):
        for name, (rows, columns) in shapes.items():
            codes, scales = packed(rows, columns, chance)
            del stored[LAYER.format(number, name)]
            stored |= {LAYER.format(number, f"{name}_blocks"): codes, LAYER.format(number, f"{name}_scales"): scales}
            values = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
            experts.get_parameter(name).data.copy_(values)
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def test_folder_with_mxfp4_experts_equals_transformers(tmp_path: Path) -> None:
    tiny = make(tmp_path, "gpt-oss", "folder")
    with torch.no_grad():
        write_mxfp4(tmp_path, tiny.reference)
    torch.testing.assert_close(our_logits(tmp_path, Recording()), their_logits(tiny.reference), rtol=0, atol=1e-4)


def gate_inputs(model: PreTrainedModel) -> list[Tensor]:
    """Return the inputs of all gates for the prompt."""
    found: list[Tensor] = []
    for experts in mixtures(model):
        experts._apply_gate = partial(_recorded, found, experts._apply_gate)  # type: ignore[assignment, arg-type]
    their_logits(model)
    return found


def _recorded(found: list[Tensor], gate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    found.append(gate_up[..., ::2].flatten())
    return gate(gate_up)


def test_some_gates_reach_their_limit(tmp_path: Path) -> None:
    """Otherwise, comparisons of logits would not test the limit."""
    model = make(tmp_path, "gpt-oss", "folder").reference
    assert torch.cat(gate_inputs(model)).gt(7).float().mean() > 0.01


def without_sinks(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)


def without_biases(model: PreTrainedModel) -> None:
    for experts in mixtures(model):
        experts.get_parameter("gate_up_proj_bias").zero_()


def without_output_biases(model: PreTrainedModel) -> None:
    for experts in mixtures(model):
        experts.get_parameter("down_proj_bias").zero_()


def without_router_biases(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.router.bias.zero_()


def without_limits(model: PreTrainedModel) -> None:
    for experts in mixtures(model):
        experts.limit = 1e9  # type: ignore[assignment]


@pytest.mark.parametrize(
    "remove", [without_sinks, without_biases, without_output_biases, without_router_biases, without_limits]
)
def test_each_part_changes_the_logits(tmp_path: Path, remove: Callable[[PreTrainedModel], None]) -> None:
    tiny = make(tmp_path, "gpt-oss", "folder")
    whole = their_logits(tiny.reference)
    with torch.no_grad():
        remove(tiny.reference)
    assert (their_logits(tiny.reference) - whole).abs().max() > 1e-2


def test_windows_change_the_logits(tmp_path: Path) -> None:
    logits = our_logits(make(tmp_path, "gpt-oss", "folder").path, Recording())
    edit_config(tmp_path, layer_types=["full_attention"] * 4)
    assert (our_logits(tmp_path, Recording()) - logits).abs().max() > 1e-2


def test_gguf_files_do_not_round_the_bounds_of_frequencies(tmp_path: Path) -> None:
    """The configuration of the folder says so, and the file does not store it."""
    gguf = make(tmp_path, "gpt-oss", "gguf")
    torch.testing.assert_close(our_logits(gguf.path, Recording()), their_logits(gguf.reference), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gate_up_proj_blocks", lambda it: it[..., :8], "does not match"),
        ("gate_up_proj_scales", lambda it: it[:, 1:], "does not match"),
        ("down_proj_blocks", lambda it: it.flatten(2), "is not supported"),
    ],
)
def test_damaged_mxfp4_matrices_are_errors(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], problem: str
) -> None:
    tiny = make(tmp_path, "gpt-oss", "folder")
    with torch.no_grad():
        write_mxfp4(tmp_path, tiny.reference)
    stored = load_file(tmp_path / "model.safetensors")
    whole = LAYER.format(1, name)
    save_file(stored | {whole: change(stored[whole]).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises((ModelFileError, UnsupportedModel), match=problem):
        our_logits(tmp_path, Recording())
