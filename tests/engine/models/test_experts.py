"""Mixtures of experts against transformers: the chosen experts, the logits of all positions, and unused tensors."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine import models
from engine.backends.reference import ReferenceDevice, ReferenceOperations, Routes
from engine.batch import build_batch
from engine.checkpoints.weights import Weights
from engine.kv.budget import group_config
from engine.kv.cache import KVCache, kv_groups
from engine.loading import open_checkpoint
from engine.model_config import ModelConfig
from engine.operations import Router
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.engine.checkpoints.quantized_folders import edit_config
from tests.engine.models.expert_families import EXPERT_FAMILIES, EXPERTS, routers
from tests.engine.models.family import CONTEXT, VOCABULARY, Family
from tests.engine.models.family_checkpoints import TinyModel, make, random_model, write_gguf
from tests.support.held_request import HeldRequest

TOKENS = 120
PROMPT = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
BLOCKS = 1 + TOKENS // 16 + 1


@pytest.fixture(autouse=True)
def _one_thread(_own_threads: None) -> None:
    """Use one thread: threads would wait for each other on tiny tensors."""
    torch.set_num_threads(1)


class Recording(ReferenceOperations):
    """Reference operations that record the routes of each layer with experts."""

    def __init__(self) -> None:
        super().__init__(keep_dequantized=True)
        self.routes: list[Routes] = []

    def route(self, x: Tensor, router: Router) -> Routes:
        self.routes.append(super().route(x, router))
        return self.routes[-1]


def our_logits(
    path: Path, operations: ReferenceOperations, change: Callable[[ModelConfig], ModelConfig] = lambda it: it
) -> Tensor:
    """Return the logits of all positions of the prompt, with the configuration that `change` returns."""
    with open_checkpoint(path) as checkpoint, torch.inference_mode():
        weights = Weights(path, models.stored_weights(checkpoint))
        model = models.load(change(models.read_config(checkpoint.metadata)), weights, operations, CONTEXT)
        groups = kv_groups(model.config, ReferenceDevice(keep_dequantized=True, threads=1).layer_block)
        kv = KVCache(groups, [BLOCKS] * len(groups))
        request = HeldRequest(1, tuple(PROMPT), SamplingParams(), block_tables=(list(range(1, BLOCKS)),) * len(groups))
        part = request.part(0, TOKENS, logprob_positions=range(TOKENS - 1))
        configs = [group_config(cache) for cache in model.config.caches]
        batch = build_batch(StepPlan((part,)), vocab_size=VOCABULARY, num_blocks=BLOCKS, groups=configs)
        logits: Tensor = model.forward(batch, kv)
    return logits


def their_logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


def mixtures(model: PreTrainedModel) -> list[nn.Module]:
    """Return the module of each layer that holds its experts."""
    return [it for it in model.modules() if type(it).__name__.endswith("Experts")]


@pytest.fixture(params=EXPERT_FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> TinyModel:
    return make(tmp_path, request.param, "folder")


@pytest.mark.share(3)
def test_chosen_experts_and_all_logits_equal_transformers(tiny: TinyModel) -> None:
    """The models have no scores that are so close that rounding decides."""
    found: list[tuple[Tensor, Tensor]] = []

    def record(_module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, weights, ids = output
        order = ids.argsort(dim=-1)
        found.append((ids.gather(1, order), weights.gather(1, order)))

    for router in routers(tiny.reference):
        router.register_forward_hook(record)
    operations = Recording()
    logits = our_logits(tiny.path, operations)
    torch.testing.assert_close(logits, their_logits(tiny.reference), rtol=0, atol=1e-4)
    assert len(operations.routes) == len(found) == len(mixtures(tiny.reference)) > 0
    for ours, (ids, weights) in zip(operations.routes, found, strict=True):
        assert torch.equal(ours.ids, ids)
        torch.testing.assert_close(ours.weights, weights, rtol=0, atol=1e-5)


@pytest.mark.share(3)
def test_each_expert_matters(tiny: TinyModel) -> None:
    """Without any one expert, logits differ by 100 times the tolerance, so the comparisons find a missing expert."""
    whole = their_logits(tiny.reference)
    for mixture in mixtures(tiny.reference):
        down = mixture.down_proj
        assert isinstance(down, Tensor)
        for number in range(EXPERTS):
            kept = down[number].clone()
            with torch.no_grad():
                down[number] = 0
                assert (their_logits(tiny.reference) - whole).abs().max() > 1e-2
                down[number] = kept


# -- tensors that are not loaded


def with_draft_layer() -> tuple[Family, PreTrainedModel]:
    """Return a GLM with four layers. Its checkpoints declare the last one a draft layer."""
    family = EXPERT_FAMILIES["glm moe"]
    family = replace(family, options={**family.options, "num_hidden_layers": 4})
    return family, random_model(family, seed=7)


def drafts(_config: PreTrainedConfig) -> Mapping[str, Tensor]:
    return {"blk.3.nextn.eh_proj.weight": torch.ones(128, 256), "v.blk.0.attn_q.weight": torch.ones(8, 8)}


def write_drafts(writer: GGUFWriter, config: PreTrainedConfig, *, family: Family) -> None:
    assert family.gguf
    family.gguf.write(writer, config)
    writer.add_nextn_predict_layers(1)


def test_draft_layers_and_vision_tensors_of_a_gguf_file_are_not_loaded(tmp_path: Path) -> None:
    family, model = with_draft_layer()
    assert family.gguf
    form = replace(family.gguf, write=partial(write_drafts, family=family), tensors=drafts)
    path = write_gguf(tmp_path / "tiny.gguf", model, form)
    del model.model.layers[3:]
    torch.testing.assert_close(our_logits(path, Recording()), their_logits(model), rtol=0, atol=1e-4)


def test_draft_layers_and_vision_tensors_of_a_folder_are_not_loaded(tmp_path: Path) -> None:
    _, model = with_draft_layer()
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, num_hidden_layers=3, num_nextn_predict_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": torch.ones(128, 256), "model.visual.blocks.0.weight": torch.ones(8)}
    save_file(stored | more, tmp_path / "model.safetensors")
    del model.model.layers[3:]
    torch.testing.assert_close(our_logits(tmp_path, Recording()), their_logits(model), rtol=0, atol=1e-4)


DRAFT_MODULES = {
    "ernie moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"),
    "qwen3-next": ("mtp.layers.0.mlp.shared_expert.up_proj.weight", "mtp.fc.weight"),
}


@pytest.mark.parametrize("name", DRAFT_MODULES)
def test_draft_modules_outside_of_the_layers_are_not_loaded(tmp_path: Path, name: str) -> None:
    tiny = make(tmp_path, name, "folder")
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {it: torch.ones(8, 8) for it in DRAFT_MODULES[name]}, tmp_path / "model.safetensors")
    torch.testing.assert_close(our_logits(tmp_path, Recording()), their_logits(tiny.reference), rtol=0, atol=1e-4)


def test_matrices_of_older_gguf_files_are_loaded(tmp_path: Path) -> None:
    """Files of Mixtral from 2023 have one tensor per expert."""
    model = random_model(EXPERT_FAMILIES["mixtral moe"], seed=8)
    form = EXPERT_FAMILIES["mixtral moe"].gguf
    assert form
    path = write_gguf(tmp_path / "tiny.gguf", model, form, stacked=False)
    torch.testing.assert_close(our_logits(path, Recording()), their_logits(model), rtol=0, atol=1e-4)
