"""Inputs of linear layers in every decoder family, compared with hooks on transformers' layers."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine import calibration
from engine.calibration import CHUNK, input_squares
from engine.errors import EngineError, OutOfMemory, UnsupportedModel
from engine.loading import open_checkpoint
from engine.models import read_config
from tests.engine.models.family import CONTEXT, VOCABULARY
from tests.engine.models.family_checkpoints import FAMILIES, TinyModel, make


@pytest.fixture(autouse=True)
def _one_thread(_own_threads: None) -> None:
    """Use one thread: threads would wait for each other on tiny tensors."""
    torch.set_num_threads(1)


def measured(path: Path, ids: Sequence[int]) -> tuple[dict[str, Tensor], list[int]]:
    reports: list[int] = []
    with open_checkpoint(path) as checkpoint:
        return input_squares(checkpoint, ids, reports.append), reports


def context_length(path: Path) -> int:
    with open_checkpoint(path) as checkpoint:
        return read_config(checkpoint.metadata).context_length


def expected(tiny: TinyModel, ids: Sequence[int]) -> dict[str, Tensor]:
    """Return the mean squares of the inputs of each layer, keyed by the name of its weight, without the head."""
    found: dict[str, Tensor] = {}
    hooks = []
    for name, module in tiny.reference.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(("lm_head", "router.proj")):

            def hook(_module: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                found[f"{name}.weight"] = given[0].flatten(0, -2).double().square().mean(0).float()

            hooks.append(module.register_forward_pre_hook(hook))
    with torch.inference_mode():
        tiny.reference(torch.tensor([list(ids)]))
    for handle in hooks:
        handle.remove()
    return found


def text(length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,)).tolist()


@pytest.mark.share(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_input_squares_equal_transformers_hooks(tmp_path: Path, family: str) -> None:
    tiny = make(tmp_path, family, "folder")
    ids = text(min(CHUNK + 41, context_length(tiny.path)))
    found, reports = measured(tiny.path, ids)
    layers = {name: squares for name, squares in found.items() if ".experts." not in name}  # hooks see no experts
    torch.testing.assert_close(layers, expected(tiny, ids), rtol=1e-3, atol=1e-6)
    assert reports == [*range(CHUNK, len(ids), CHUNK), len(ids)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make(tmp_path_factory.mktemp("llama"), "qwen2", "folder")


def test_tokens_past_the_context_are_ignored(llama: TinyModel) -> None:
    ids = text(CONTEXT + 9)
    found, reports = measured(llama.path, ids)
    assert reports[-1] == CONTEXT
    torch.testing.assert_close(found, measured(llama.path, ids[:CONTEXT])[0], rtol=0, atol=0)


@pytest.mark.parametrize("ids", [[], [3, VOCABULARY]])
def test_text_outside_the_vocabulary_is_rejected(llama: TinyModel, ids: list[int]) -> None:
    with pytest.raises(UnsupportedModel, match="vocabulary"):
        measured(llama.path, ids)


def test_model_larger_than_memory_is_rejected(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "available_memory", lambda: 100_000)
    with pytest.raises(OutOfMemory):
        measured(llama.path, text(5))


def test_nan_in_the_weights_raises_an_error(llama: TinyModel, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(llama.path, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3] = torch.nan
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(EngineError, match="NaN or infinite"):
        measured(broken, text(5))
