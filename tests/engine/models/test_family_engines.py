"""Every decoder family in the engine: greedy tokens with preemption and with cached prefixes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import Preemption
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.engine.models.expert_families import EXPERT_FAMILIES
from tests.engine.models.family import ORIGINAL, VOCABULARY
from tests.engine.models.family_checkpoints import FAMILIES, TinyModel, make

CONTEXT = 112  # tokens, seven blocks: together the requests exceed them, even if all layers have a window
LENGTHS = (20, 26, 30)
REPLY = 40
HOST_BYTES = 64 << 20
RECURRENT = ("lfm2", "qwen3.5", "qwen3-next")
LONG_ROPE = ("phi3 longrope", "phi4 mini")


@pytest.fixture(autouse=True)
def _one_thread(_own_threads: None) -> None:
    """Use one thread: threads would wait for each other on tiny tensors."""
    torch.set_num_threads(1)


def engine(path: Path, preemption: Preemption, context: int = CONTEXT) -> ModelEngine:
    host = HOST_BYTES if preemption is Preemption.SWAP else 0
    options = LoadOptions(
        backend="reference", context_length=context, threads=1, preemption=preemption, host_cache=host
    )
    with open_checkpoint(path) as checkpoint:
        return load_engine(checkpoint, options)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def answer(running: ModelEngine, *prompts: tuple[int, ...], reply: int = REPLY) -> list[Request]:
    params = SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True)
    requests = [running.request(ids, params, frozenset()) for ids in prompts]
    for it in requests:
        running.add(it)
    while running.has_work:
        running.step()
    return requests


def predictions(tiny: TinyModel, it: Request, context: int) -> Tensor:
    """Return transformers' logits for each token of a reply.

    The sequence is padded to the whole context, because the scaling of some ropes depends on its length.
    """
    ids = [*it.prompt_ids, *it.output_ids]
    with torch.inference_mode():
        logits: Tensor = tiny.reference(torch.tensor([ids + [0] * (context - len(ids))])).logits[0]
    return logits[len(it.prompt_ids) - 1 : len(ids) - 1]


def check(tiny: TinyModel, it: Request, context: int = CONTEXT) -> None:
    """Check that each token is the most likely one in transformers, within rounding."""
    logits = predictions(tiny, it, context)
    chosen = logits.gather(1, torch.tensor(it.output_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chosen, logits.amax(-1), rtol=0, atol=1e-3)


@pytest.mark.share(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_preemption_and_cached_prefixes_do_not_change_replies(tmp_path: Path, name: str) -> None:
    tiny = make(tmp_path, name, "folder")
    preemption = Preemption.SWAP if "window" in name or "gemma" in name else Preemption.RECOMPUTE
    running = engine(tiny.path, preemption)
    requests = answer(running, *map(prompt, LENGTHS))
    counters = running.state().counters
    assert counters.swapped_out + counters.recomputed > 0
    for it in requests:
        assert len(it.output_ids) == REPLY
        check(tiny, it)
    (alone,) = answer(running, prompt(LENGTHS[-1]))
    assert alone.output_ids == requests[-1].output_ids
    part = (*alone.prompt_ids, *alone.output_ids[:10])
    (again,) = answer(running, part, reply=REPLY - 10)
    assert again.num_cached >= (16 if name.startswith(RECURRENT) else 32)  # states are kept at the ends of prompts
    assert again.output_ids == alone.output_ids[10:]
    (third,) = answer(running, part, reply=REPLY - 10)  # a state is now also kept where the prompts differ
    assert third.num_cached >= 32
    assert third.output_ids == alone.output_ids[10:]


@pytest.mark.parametrize("name", LONG_ROPE)
def test_short_context_uses_the_short_rope_factors(tmp_path: Path, name: str) -> None:
    """transformers chooses the factors by the length of the sequence, the engine by its context length."""
    tiny = make(tmp_path, name, "folder")
    short, long = (engine(tiny.path, Preemption.AUTO, context) for context in (ORIGINAL, ORIGINAL + 1))
    (short_reply,), (long_reply,) = (answer(it, prompt(30), reply=20) for it in (short, long))
    check(tiny, short_reply, ORIGINAL)
    assert short_reply.output_ids != long_reply.output_ids
    assert short.config.cache_salt != long.config.cache_salt


# -- on the CPU kernels


@pytest.mark.share(15)
@pytest.mark.parametrize("name", FAMILIES)
def test_cpu_kernels_are_close_to_transformers(tmp_path: Path, cpu_kernels: Path, name: str) -> None:
    """The CPU kernels use 14-bit activations, and float16 keys and values.

    A router whose largest scores are nearly equal may therefore choose another expert, so that more than rounding
    differs. The limit is then on most tokens instead of all.
    """
    tiny = make(tmp_path, name, "folder")
    options = LoadOptions("cpu", CONTEXT, threads=1, activation_bits=14, code_cache=cpu_kernels)
    with open_checkpoint(tiny.path) as checkpoint:
        running = load_engine(checkpoint, options)
    params = SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True, logprobs=0)
    requests = {it.id: it for it in (running.request(prompt(length), params, frozenset()) for length in LENGTHS)}
    found: dict[int, list[float]] = {number: [] for number in requests}
    for it in requests.values():
        running.add(it)
    while running.has_work:
        for event in running.step():
            if event.logprobs:
                found[event.request_id].append(event.logprobs.logprob)
    for number, it in requests.items():
        wanted = predictions(tiny, it, CONTEXT).log_softmax(-1).gather(1, torch.tensor(it.output_ids).unsqueeze(1))
        errors = (torch.tensor(found[number]) - wanted.squeeze(1)).abs()
        far = int((errors > 0.05).sum())
        assert far <= (REPLY // 10 if name in EXPERT_FAMILIES else 0), errors
