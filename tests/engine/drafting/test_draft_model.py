"""A draft model: its cache holds the right tokens, replies are the same with it, and its failures end no request."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config import GroupConfig, Preemption
from engine.draft import NO_DRAFTS, Draft, DraftCounts, Source
from engine.drafting.acceptance import Acceptance
from engine.drafting.draft_model import DraftModel
from engine.drafting.model_drafts import ModelDrafts
from engine.drafting.plan import DraftPlan, Room
from engine.errors import UnsupportedModel
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_draft_model, load_engine, open_checkpoint
from engine.request import Origin, Request
from engine.sampling_params import SamplingParams
from tests.engine.drafting.eager_drafter import EagerDrafter
from tests.engine.drafting.forced_replies import replies
from tests.engine.hash_run import Run
from tests.engine.models import family_checkpoints
from tests.engine.models.tiny_llama import make
from tests.engine.test_hash_model import GROUPS, Load
from tests.support.hash_model import VOCABULARY, HashRunner, hash_engine

LENGTH = 60  # tokens of a reply
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
CASES = {
    "greedy": GREEDY,
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=LENGTH, logprobs=3),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=3, max_tokens=LENGTH, logprobs=0),
}


# -- over the hash model, in which one wrong block changes every later draft


def hash_draft_model(
    *, seed: int = 0, num_blocks: int = 64, vocabulary: int = VOCABULARY, target: int = VOCABULARY,
    groups: tuple[GroupConfig, ...] = (GroupConfig(),),
) -> tuple[DraftModel, HashRunner]:  # fmt: skip
    engine, runner = hash_engine(seed=seed, num_blocks=num_blocks, groups=groups)
    return DraftModel(engine.config, vocabulary, target, runner), runner


@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize("groups", ["full", "windows"])
def test_drafts_of_the_same_model_are_right_under_random_load(
    groups: str, preemption: Preemption, num_blocks: int
) -> None:
    """Greedy requests only, so every draft is right if the shadow of its request is. In a pool of 12 blocks, shadows
    lose their blocks all the time.
    """
    rng = random.Random(f"{groups} {preemption} {num_blocks}")
    engine, _ = hash_engine(
        seed=rng.randrange(1 << 30), num_blocks=40, budget=96, groups=GROUPS[groups], host_blocks=20,
        preemption=preemption, drafts=True,
    )  # fmt: skip
    model, _ = hash_draft_model(seed=rng.randrange(1 << 30), num_blocks=num_blocks, groups=GROUPS[groups])
    engine._scheduler._verification.drafter = EagerDrafter(model)
    run, load = Run(engine), Load(rng)
    while len(run.requests) < 60:
        for prompt in load.arrivals() if rng.random() < 0.3 else ():
            run.submit(prompt, max_tokens=rng.randrange(1, 60), ignore_eos=True)
        run.step()
    run.run_out()
    run.check()
    counts = engine.state().counters.drafts[Source.MODEL]
    assert counts.drafted > 30
    assert counts.accepted == counts.drafted


def test_wrong_drafts_are_overwritten() -> None:
    """Drawn requests, for which the greedy drafts are wrong. Afterwards, greedy ones with the same tokens are right."""
    engine, _ = hash_engine(drafts=True)
    model, _ = hash_draft_model()
    engine._scheduler._verification.drafter = EagerDrafter(model)
    run = Run(engine)
    drawn = run.submit(tuple(range(100, 140)), max_tokens=40, ignore_eos=True, top_k=1, seed=5)
    run.run_out()
    assert drawn.drafts.drafted > 0
    assert drawn.drafts.accepted == 0
    greedy = run.submit((*drawn.prompt_ids, *drawn.output_ids), max_tokens=40, ignore_eos=True)
    run.run_out()
    run.check()
    assert greedy.drafts.accepted == greedy.drafts.drafted > 10


def request(number: int, prompt: Sequence[int], *output: int, salt: str = "") -> Request:
    return Request(number, tuple(prompt), GREEDY, origin=Origin(cache_salt=salt), output_ids=list(output))


def always(draft: Draft) -> bool:
    return True


def test_prompt_of_an_earlier_request_is_not_computed_again() -> None:
    model, runner = hash_draft_model()
    prompt = range(100, 150)
    first, other = request(1, prompt, 5), request(2, prompt, 6, salt="other")
    model.draft([first], 1, always)
    model.drop(first.id)
    before = runner.computed_tokens
    model.draft([request(3, prompt, 5)], 1, always)
    assert runner.computed_tokens - before == 51 - 48
    model.draft([other], 1, always)
    assert runner.computed_tokens - before == 51 - 48 + 51


def test_forgotten_tokens_are_computed_again() -> None:
    model, runner = hash_draft_model()
    prompt = tuple(range(100, 150))
    model.draft([request(1, prompt, 5)], 1, always)
    model.drop(1)
    model.forget(prompt, Origin(), kept=0)
    before = runner.computed_tokens
    model.draft([request(2, prompt, 5)], 1, always)
    assert runner.computed_tokens - before == 51


def test_prefill_leaves_one_token_for_the_first_draft() -> None:
    model, runner = hash_draft_model()
    asked = request(1, range(100, 150), 5)
    for most, left in ((20, 31), (20, 11), (20, 1), (20, 1)):
        model.prefill(asked, most)
        assert model.num_missing(asked) == left
    model.draft([asked], 3, always)
    assert runner.computed_tokens == 51 + 2  # the last drafted token is not computed


def test_no_draft_without_free_blocks() -> None:
    model, _ = hash_draft_model(num_blocks=5)  # 64 tokens
    short, long = request(1, range(100, 120), 5), request(2, range(100, 163), 5)
    assert model.draft([short, long], 2, always).keys() == {1}
    assert not model.can_follow(long)


def test_tokens_that_one_of_the_models_lacks() -> None:
    model, _ = hash_draft_model(vocabulary=150, target=VOCABULARY)
    assert model.can_follow(request(1, range(100, 150)))
    assert not model.can_follow(request(2, range(100, 151)))
    model, _ = hash_draft_model(target=0)
    assert model.draft([request(1, range(100, 120), 5)], 4, always) == {}


def test_missing_tokens_of_all_requests_fit_into_a_step() -> None:
    model, runner = hash_draft_model()  # 64 tokens per step
    first, second = request(1, range(100, 140), 5), request(2, range(200, 240), 5)
    assert model.draft([first, second], 1, always).keys() == {1}
    assert model.draft([first, second], 1, always).keys() == {1, 2}
    assert runner.computed_tokens == 41 + 1 + 41


def test_draft_ends_at_an_end_token() -> None:
    model, _ = hash_draft_model()
    asked = request(1, range(100, 120), 5)
    tokens = model.draft([asked], 6, always)[1].token_ids
    assert len(tokens) == 6
    other = replace(asked, id=2, end_ids=frozenset({tokens[3]}))
    assert model.draft([other], 6, always)[2].token_ids == tokens[:4]


def test_failure_of_the_draft_model_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = hash_engine(drafts=True)
    model, runner = hash_draft_model()
    engine.draft_with(model)
    model.seconds = lambda requests: 0.0  # type: ignore[method-assign]
    runner.launch = None  # type: ignore[assignment, method-assign]
    run = Run(engine)
    run.submit((1, 2, 3), max_tokens=20, ignore_eos=True)
    run.run_out()
    run.check()
    assert [record.message for record in caplog.records] == ["the draft model failed, and is not used any more"]


# -- when it drafts


class Clockwork(DraftModel):
    """A hash model whose steps are said to take `step` seconds, and `token` seconds per token of a prompt."""

    def __init__(self, step: float, token: float = 0.0) -> None:
        engine, self.runner = hash_engine(num_blocks=512)
        super().__init__(engine.config, VOCABULARY, VOCABULARY, self.runner)
        self.step, self.token = step, token

    def seconds(self, requests: int) -> float:
        return self.step

    def prefill_seconds(self, tokens: int) -> float:
        return self.token * tokens


def target_seconds(tokens: int) -> float:
    return 0.8 + 0.2 * tokens


NOTHING = DraftPlan({}, 1.03)


def decode(drafts: ModelDrafts, asked: Request, steps: int, *, right: bool, room: Room) -> list[int]:
    """Decode, and return the number of tokens drafted in each step. Drafted tokens are all right, or all wrong."""
    lengths = []
    for _ in range(steps):
        found = drafts.choose([asked], NOTHING, room).get(asked.id)
        tokens = found.token_ids if found else ()
        lengths.append(len(tokens))
        asked.output_ids += [*tokens, 7] if right else [(tokens[0] + 1) % VOCABULARY if tokens else 7]
    return lengths


def test_drafts_grow_while_they_are_right() -> None:
    drafts = ModelDrafts(Clockwork(0.05), Acceptance(), target_seconds)
    lengths = decode(drafts, request(1, range(100, 120), 5), 100, right=True, room=Room(1, most=15))
    assert lengths[0] == 0  # the prompt is prefilled
    assert 1 <= lengths[2] < min(lengths[-20:]) <= max(lengths) <= 15
    assert min(lengths[-20:]) > 8


def test_wrong_drafts_stop_except_for_trials() -> None:
    """Trials take at most one percent of the time of decoding."""
    drafts = ModelDrafts(Clockwork(0.05), Acceptance(), target_seconds)
    lengths = decode(drafts, request(1, range(100, 120), 5), 1000, right=False, room=Room(1, most=15))
    assert sum(lengths[:20]) > 5
    assert set(lengths[100:]) == {0, 1}
    assert sum(lengths[100:]) * 0.05 <= 0.0101 * 900


def test_no_drafts_of_a_slow_model() -> None:
    drafts = ModelDrafts(Clockwork(2.0), Acceptance(), target_seconds)
    assert sum(decode(drafts, request(1, range(100, 120), 5), 150, right=True, room=Room(1, most=15))) == 0


def test_no_draft_takes_longer_than_the_room() -> None:
    drafts = ModelDrafts(Clockwork(0.05), Acceptance(), target_seconds)
    room = Room(1, most=15, longest=1.6)
    lengths = decode(drafts, request(1, range(100, 120), 5), 50, right=True, room=room)
    assert max(lengths) == 2  # 0.8 + 0.2 * 3 + 0.05 * 2


def test_long_prompt_is_prefilled_in_chunks_that_take_half_a_step() -> None:
    model = Clockwork(0.005, token=0.001)
    drafts = ModelDrafts(model, Acceptance(), lambda tokens: 0.08 + 0.02 * tokens)
    asked, computed = request(1, range(100, 500), 5), [0]
    for _ in range(7):
        assert not drafts.choose([asked], DraftPlan({}, 10.3), Room(1, most=15))
        computed.append(model.runner.computed_tokens)
        asked.output_ids.append(7)
    assert [after - before for before, after in pairwise(computed)] == [50] * 7
    assert any(drafts.choose([asked], DraftPlan({}, 10.3), Room(1, most=15)) for _ in range(2))


# -- on real backends


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a stranger with other weights, whose drafts are nearly always wrong."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("target", "stranger")}
    return {
        name: make(folder, head_dim=32, hidden=64, seed=seed).path
        for seed, (name, folder) in enumerate(folders.items())
    }


@pytest.fixture(scope="module")
def drafting(paths: dict[str, Path], cpu_kernels: Path) -> Callable[[str, str], ModelEngine]:
    """Return an engine for the target with a draft model that always drafts."""
    loaded: dict[tuple[str, str], ModelEngine] = {}

    def engine(backend: str, draft: str) -> ModelEngine:
        if (backend, draft) not in loaded:
            # no target latency: the time of a step would limit the drafts of several streams
            options = LoadOptions(backend=backend, code_cache=cpu_kernels, target_latency=0.0)
            with open_checkpoint(paths["target"]) as target, open_checkpoint(paths[draft]) as small:
                made = loaded[backend, draft] = load_engine(target, options)
                model = load_draft_model(small, options, made)
            made._scheduler._verification.drafter = EagerDrafter(model)
        return loaded[backend, draft]

    return engine


@pytest.mark.share(1, "case")
@pytest.mark.parametrize("draft", ["target", "stranger"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_reply_is_the_same_with_a_draft_model(
    drafting: Callable[[str, str], ModelEngine], case: str, backend: str, draft: str
) -> None:
    engine, rng = drafting(backend, draft), random.Random(case)
    prompt = tuple(rng.randrange(4, 97) for _ in range(rng.randrange(1, 60)))
    several = [replace(CASES[case], seed=seed) for seed in range(1 if case == "greedy" else 3)]
    plain = replies(engine, prompt, [replace(it, drafts=False) for it in several])
    before = drafted(engine)
    assert replies(engine, prompt, several) == plain
    counts = DraftCounts(drafted(engine).drafted - before.drafted, drafted(engine).accepted - before.accepted)
    assert counts.drafted > 0
    if draft == "target" and case == "greedy":
        assert counts.accepted == counts.drafted > LENGTH // 2


def drafted(engine: ModelEngine) -> DraftCounts:
    return engine.state().counters.drafts.get(Source.MODEL, NO_DRAFTS)


def test_engine_without_verification_refuses_a_draft_model(paths: dict[str, Path]) -> None:
    options = LoadOptions(backend="reference", drafts=False)
    with open_checkpoint(paths["target"]) as target, open_checkpoint(paths["stranger"]) as small:
        engine = load_engine(target, options)
        with pytest.raises(UnsupportedModel, match="verifies no drafts"):
            load_draft_model(small, options, engine)


def test_model_with_states_cannot_draft(paths: dict[str, Path], tmp_path: Path) -> None:
    options = LoadOptions(backend="reference", threads=1)
    small = family_checkpoints.make(tmp_path, "lfm2", "folder").path
    with open_checkpoint(paths["target"]) as target, open_checkpoint(small) as recurrent:
        engine = load_engine(target, options)
        with pytest.raises(UnsupportedModel, match="recurrent layers"):
            load_draft_model(recurrent, options, engine)
