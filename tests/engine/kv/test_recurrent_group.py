"""States that requests keep for later ones: in chats whose earlier reasoning is dropped, and after shared prefixes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config import BLOCK_SIZE, GroupConfig
from engine.kv.disk import store
from engine.kv.disk.quota import Quota
from engine.kv.disk.store import DiskStore
from engine.kv.recurrent_group import ADDITIONAL_STATES, thinned
from engine.request import Request, message_ends
from tests.engine.hash_run import ENDS, Run
from tests.support.hash_model import block_bytes, hash_engine

END, ASSISTANT, THINK = 1, 4001, 4002  # the last two are the generation prompt, with ASSISTANT twice
FEW_TOKENS = 32  # tokens that a turn may compute in addition to the new ones
KV_TOKEN_BYTES = 64


def groups(state_tokens: int) -> tuple[GroupConfig, ...]:
    """Return KV groups in which a state is as large as the keys and values of `state_tokens` tokens."""
    return (
        GroupConfig(block_bytes=KV_TOKEN_BYTES * BLOCK_SIZE),
        GroupConfig(recurrent=True, spacing=max(256, state_tokens), block_bytes=KV_TOKEN_BYTES * state_tokens),
    )


@dataclass
class Agent:
    """A chat that drops the reasoning of the replies before the last question."""

    run: Run
    chance: random.Random
    messages: list[list[int]] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)  # numbers of messages
    reasoned: list[tuple[int, list[int]]] = field(default_factory=list)  # (number of a message, its reasoning)

    def say(self, tokens: int, *, question: bool = True) -> None:
        if question:
            self.reasoned.clear()
            self.questions.append(len(self.messages))
        self.messages.append(self.some(tokens))

    def some(self, tokens: int) -> list[int]:
        return [self.chance.randrange(100, 4000) for _ in range(tokens)]

    def prompt(self) -> tuple[int, ...]:
        reasoned, ids = dict(self.reasoned), list[int]()
        for number, message in enumerate(self.messages):
            ids += [*message[:2], *reasoned.get(number, []), *message[2:], END]
        return (*ids, ASSISTANT, ASSISTANT, THINK)

    def marks(self) -> tuple[int, ...]:
        """Return the numbers of tokens at the ends of questions; the first message is one, as it is followed by one."""
        ends, reasoned = list[int](), dict(self.reasoned)
        for number, message in enumerate(self.messages):
            ends.append((ends[-1] if ends else 0) + len(message) + len(reasoned.get(number, ())) + 1)
        return tuple(ends[number] for number in self.questions)

    def turn(self, tokens: int = 40) -> Request:
        """Let the model reply."""
        request = self.run.submit(self.prompt(), marks=self.marks(), max_tokens=tokens, ignore_eos=True)
        self.run.run_out()
        half = tokens // 2
        reply = self.run.outputs[request.id]
        self.messages.append([ASSISTANT, ASSISTANT, *reply[half:]])
        self.reasoned.append((len(self.messages) - 1, [THINK, *reply[:half]]))
        return request


def new_run(seed: int, state_tokens: int, blocks: int = 4000, **options: object) -> Run:
    engine, _ = hash_engine(seed=seed, num_blocks=blocks, budget=512, groups=groups(state_tokens), **options)  # type: ignore[arg-type]
    return Run(engine)


def states_of(run: Run) -> int:
    """Return the number of states that later requests can find."""
    pool = run.engine._scheduler._memory.groups[1].pool
    return sum(pool.is_findable(block) for block in range(1, pool.num_blocks))


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def turns(agent: Agent, count: int, results: int) -> Iterator[tuple[Request, int]]:
    """Yield each request of a chat with `results` tool results per question, and the number of its new tokens."""
    agent.say(600)
    path: tuple[int, ...] = ()
    for number in range(count):
        agent.say(agent.chance.randrange(10, 120), question=number % (results + 1) == 0)
        prompt = agent.prompt()
        request = agent.turn()
        yield request, len(prompt) - common(path, prompt)
        path = (*prompt, *agent.run.outputs[request.id])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("results", [0, 3])
def test_turns_of_an_agent_compute_their_new_tokens_and_few_others(results: int, seed: int) -> None:
    agent = Agent(new_run(seed, state_tokens=64), random.Random(seed))
    for request, new in turns(agent, 12, results):
        assert len(request.prompt_ids) - request.num_cached <= new + FEW_TOKENS
    agent.run.check()


def test_question_after_many_tool_results_finds_the_state_of_the_last_one() -> None:
    """There is memory for few states, because each is as large as the keys and values of 3,008 tokens."""
    agent = Agent(new_run(8, state_tokens=3008), random.Random(8))
    for request, new in turns(agent, 22, 20):
        assert len(request.prompt_ids) - request.num_cached <= new + FEW_TOKENS


@pytest.mark.parametrize("state_tokens", [16, 256, 3008])
def test_states_take_as_much_as_keys_and_values_and_three_others(state_tokens: int) -> None:
    """A chat of 100 turns that drops its reasoning at each question."""
    agent = Agent(new_run(1, state_tokens), random.Random(1))
    for request, _ in turns(agent, 100, 0):
        assert 0 < states_of(agent.run) <= request.num_tokens // state_tokens + ADDITIONAL_STATES


def test_two_agents_find_their_states_in_turn() -> None:
    run = new_run(4, state_tokens=304, blocks=300)
    agents = [turns(Agent(run, random.Random(seed)), 12, 1) for seed in range(2)]
    found = computed = 0
    for pair in zip(*agents, strict=True):
        for request, new in pair:
            assert new == len(request.prompt_ids) or len(request.prompt_ids) - request.num_cached <= new + 300
            found, computed = found + request.num_cached, computed + len(request.prompt_ids) - request.num_cached - new
    assert found > 20 * computed


def test_third_prompt_with_a_shared_start_computes_only_its_own_tokens() -> None:
    run, chance = new_run(5, state_tokens=3008), random.Random(5)
    shared = tuple(chance.randrange(100, 4000) for _ in range(5000))
    for _ in range(3):
        own = tuple(chance.randrange(100, 4000) for _ in range(70))
        request = run.submit((*shared, *own), max_tokens=2, ignore_eos=True)
        run.run_out()
    assert len(request.prompt_ids) - request.num_cached <= 70 + 15


def test_short_prompt_keeps_a_state_at_its_end() -> None:
    """Also one of less than two blocks, whose end is not far from the state before the first token."""
    run, chance = new_run(9, state_tokens=64), random.Random(9)
    prompt = tuple(chance.randrange(100, 4000) for _ in range(30))
    run.submit(prompt, max_tokens=40, ignore_eos=True)
    run.run_out()
    again = run.submit(prompt, max_tokens=2, ignore_eos=True)
    run.run_out()
    assert again.num_cached == 16


def test_regenerated_reply_leaves_the_state_of_the_first() -> None:
    run = new_run(6, state_tokens=64)
    agent = Agent(run, random.Random(6))
    agent.say(300)
    prompt = agent.prompt()
    first = run.submit(prompt, max_tokens=60, ignore_eos=True)
    run.run_out()
    run.submit(prompt, max_tokens=60, ignore_eos=True, top_k=1, seed=3)
    run.run_out()
    again = run.submit((*prompt, *run.outputs[first.id], END, *agent.some(20)), max_tokens=2, ignore_eos=True)
    run.run_out()
    assert len(again.prompt_ids) - again.num_cached <= 21 + FEW_TOKENS


def test_dropped_states_are_deleted_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SINGLE_BLOCK_BYTES", 4096)
    config = groups(state_tokens=304)
    files = DiskStore(tmp_path / "model", bytes(32), block_bytes(config), Quota(tmp_path, 1 << 30))
    agent = Agent(new_run(7, 304, store=files), random.Random(7))
    for request, _ in turns(agent, 40, 0):
        agent.run.engine.flush()
        states = list(tmp_path.glob("model/*/*-1-*.run"))
        assert 0 < len(states) <= request.num_tokens // 304 + ADDITIONAL_STATES


def test_marks_are_the_ends_of_messages() -> None:
    assert message_ends((5, END, 7, 8, END, 9), ENDS - {5, 7, 8, 9}) == (2, 5)
    assert message_ends((5, 6), frozenset()) == ()


def test_thinned_states_are_denser_near_the_end() -> None:
    tokens = list(range(256, 256 * 101, 256))
    left = sorted({*tokens} - {*thinned(tokens, {512}, 12)})
    assert len(left) == 12
    assert {512, tokens[-1]} <= {*left}
    gaps = [after - before for before, after in pairwise(left[1:])]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == 256


def test_needed_states_are_not_thinned() -> None:
    assert thinned([16, 32, 48], {16, 32}, 1) == []
    assert thinned([16, 32, 48, 64], {16}, 1) == [32, 48]
    assert thinned([], {16}, 0) == []
