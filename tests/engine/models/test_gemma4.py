"""Gemma 4: parts of the model that its logits depend on, the caches of its layers, and where its tables are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine import models
from engine.backends.cuda.device import CudaDevice
from engine.backends.reference import ReferenceDevice, ReferenceOperations
from engine.batch import build_batch
from engine.checkpoints.weights import Weights
from engine.config import BLOCK_SIZE
from engine.errors import UnsupportedModel
from engine.kv.budget import group_config
from engine.kv.cache import KVCache, kv_groups
from engine.load_options import LoadOptions
from engine.loading import load_engine, open_checkpoint
from engine.mixer_config import AttentionConfig
from engine.model_config import Gate
from engine.operations import GatedMLP
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.engine.checkpoints.quantized_folders import edit_config
from tests.engine.models.family import CONTEXT, VOCABULARY
from tests.engine.models.family_checkpoints import FAMILIES, make
from tests.engine.models.test_experts import PROMPT, TOKENS, Recording, our_logits, their_logits
from tests.support.held_request import HeldRequest

FAMILY = [name for name in FAMILIES if name.startswith("gemma4")]
OWN, EXPERTS, TIED = "gemma4 embeddings per layer", "gemma4 moe", "gemma4 values are keys"


def modules(model: PreTrainedModel, name: str) -> list[nn.Module]:
    return [it for path, it in model.named_modules() if path.endswith(name)]


def without_layer_scales(model: PreTrainedModel) -> None:
    for name, values in model.named_buffers():
        if name.endswith("layer_scalar"):
            values.fill_(1.0)


def without_value_norms(model: PreTrainedModel) -> None:
    for it in modules(model, "v_norm"):
        it.forward = lambda x: x


def without(*names: str) -> Callable[[PreTrainedModel], None]:
    def remove(model: PreTrainedModel) -> None:
        for name in names:
            for it in modules(model, name):
                it.get_parameter("weight").zero_()

    remove.__name__ = f"without {names[0]}"
    return remove


def without_router_scales(model: PreTrainedModel) -> None:
    for it in modules(model, "router"):
        it.get_parameter("scale").fill_(1.0)


def without_expert_scales(model: PreTrainedModel) -> None:
    for it in modules(model, "router"):
        it.get_parameter("per_expert_scale").fill_(1.0)


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        ("gemma4", without_layer_scales),
        ("gemma4", without_value_norms),
        (OWN, without("embed_tokens_per_layer")),
        (OWN, without("per_layer_model_projection")),
        (OWN, without("per_layer_projection")),
        (EXPERTS, without("mlp.down_proj")),
        (EXPERTS, without("post_feedforward_layernorm_2")),
        (EXPERTS, without_router_scales),
        (EXPERTS, without_expert_scales),
    ],
)
def test_each_part_changes_the_logits(tmp_path: Path, name: str, remove: Callable[[PreTrainedModel], None]) -> None:
    tiny = make(tmp_path, name, "folder")
    whole = their_logits(tiny.reference)
    with torch.no_grad():
        remove(tiny.reference)
    assert (their_logits(tiny.reference) - whole).abs().max() > 1e-2


@pytest.mark.parametrize(
    "rope", [{"partial_rotary_factor": 1.0}, {"partial_rotary_factor": 0.25, "rope_theta": 10_000.0}], ids=str
)
def test_rope_of_whole_context_changes_the_logits(tmp_path: Path, rope: dict[str, float]) -> None:
    path = make(tmp_path, "gemma4", "folder").path
    logits = our_logits(path, Recording())
    full = {"rope_type": "proportional", "rope_theta": 1e6} | rope
    sliding = {"rope_type": "default", "rope_theta": 10_000.0}
    edit_config(path, rope_parameters={"full_attention": full, "sliding_attention": sliding})
    assert (our_logits(path, Recording()) - logits).abs().max() > 1e-2


def test_windows_change_the_logits(tmp_path: Path) -> None:
    path = make(tmp_path, OWN, "folder").path
    logits = our_logits(path, Recording())
    edit_config(path, sliding_window=8)
    assert (our_logits(path, Recording()) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("name", FAMILY)
def test_layers_that_share_keys_have_no_cache(tmp_path: Path, name: str, source: str) -> None:
    """The bytes of a token are those of the layers with their own keys and values."""
    tiny = make(tmp_path, name, source)
    with open_checkpoint(tiny.path) as checkpoint:
        config = models.read_config(checkpoint.metadata)
    theirs = tiny.reference.config
    kept = config.layers[: len(config.layers) - theirs.num_kv_shared_layers]
    elements = 0
    for number in range(len(kept)):
        own = theirs.per_layer_config[number]
        elements += 2 * own.num_key_value_heads * own.head_dim
    groups = kv_groups(config, ReferenceDevice(keep_dequantized=True, threads=1).layer_block)
    assert sum(group.block_bytes for group in groups) == 4 * elements * BLOCK_SIZE
    shared = [it.mixer.source for it in config.layers[len(kept) :] if isinstance(it.mixer, AttentionConfig)]
    assert shared == ([2, 3] if name == OWN else [])


@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_tables_of_layers_are_no_weights_of_a_gpu(tmp_path: Path, source: str) -> None:
    tiny = make(tmp_path, OWN, source)
    with open_checkpoint(tiny.path) as checkpoint:
        stored = models.stored_weights(checkpoint)
    device = CudaDevice.__new__(CudaDevice)  # without a GPU
    table = 4 * VOCABULARY * 32 * tiny.reference.config.num_hidden_layers
    assert sum(it.nbytes for it in stored.values()) - device.weight_bytes(stored) == table


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 5}, "No layer before"),
        ({"per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 32}}}, "differ in more than their heads"),
        ({"per_layer_config": {"1": {"head_dim": 64, "hidden_size": 32}}}, "differ in more than their heads"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_errors(tmp_path: Path, changed: dict[str, object], problem: str) -> None:
    path = make(tmp_path, OWN, "folder").path
    edit_config(path, **changed)
    with pytest.raises(UnsupportedModel, match=problem):
        our_logits(path, Recording())


def test_published_keys_of_heads_equal_those_listed_by_layer(tmp_path: Path) -> None:
    """The files on the Hub have two keys; newer versions of transformers write a table of layers."""
    path = make(tmp_path, TIED, "folder").path
    logits = our_logits(path, Recording())
    edit_config(path, per_layer_config=None, global_head_dim=64, num_global_key_value_heads=1)
    assert torch.equal(our_logits(path, Recording()), logits)


class CountedRows(ReferenceOperations):
    """Reference operations that record the number of rows of each layer's MLP."""

    def __init__(self) -> None:
        super().__init__(keep_dequantized=True)
        self.rows: list[int] = []

    def gated_mlp(self, x: Tensor, mlp: GatedMLP, add_to: Tensor | None = None, gate: Gate = Gate.SILU) -> Tensor:
        self.rows.append(len(x))
        return super().gated_mlp(x, mlp, add_to, gate)


def test_layers_without_keys_compute_only_tokens_whose_logits_are_needed(tmp_path: Path) -> None:
    tiny, operations = make(tmp_path, OWN, "folder"), CountedRows()
    with open_checkpoint(tiny.path) as checkpoint:
        config = models.read_config(checkpoint.metadata)
        model = models.load(config, Weights(tiny.path, models.stored_weights(checkpoint)), operations, CONTEXT)
    kv = KVCache(kv_groups(config, ReferenceDevice(keep_dequantized=True, threads=1).layer_block), [9, 9])
    request = HeldRequest(1, tuple(PROMPT), SamplingParams(), block_tables=(list(range(1, 9)),) * 2)
    groups = [group_config(cache) for cache in config.caches]
    for stop, counts in ((50, [50] * 4 + [0] * 2), (TOKENS, [TOKENS - 50] * 4 + [1] * 2)):
        operations.rows.clear()
        plan = StepPlan((request.next_part(stop - request.num_computed),))
        batch = build_batch(plan, vocab_size=VOCABULARY, num_blocks=9, groups=groups)
        with torch.inference_mode():
            logits = model.forward(batch, kv)
        request.num_computed = stop
        assert operations.rows == counts
    torch.testing.assert_close(logits, their_logits(tiny.reference)[-1:], rtol=0, atol=1e-4)


def test_all_prompt_positions_on_cpu_kernels_are_close_to_transformers(tmp_path: Path, cpu_kernels: Path) -> None:
    """Each step computes the logits of all its tokens, of more rows than there are slots for divided tiles."""
    tiny = make(tmp_path, OWN, "folder")
    options = LoadOptions("cpu", CONTEXT, threads=2, activation_bits=14, code_cache=cpu_kernels)
    with open_checkpoint(tiny.path) as checkpoint:
        running = load_engine(checkpoint, options)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    running.add(running.request(tuple(PROMPT), params, frozenset()))
    found: list[float] = []
    while running.has_work:
        for event in running.step():
            found += [it.logprob for it in event.prompt_logprobs]
    wanted = their_logits(tiny.reference).log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1))
    torch.testing.assert_close(torch.tensor(found), wanted.squeeze(1), rtol=0, atol=0.05)
