"""Drafts never change a reply of a real model to a real prompt: text, tool calls, log-probabilities, and its end.

The full run is `pytest tests/app/generation/test_drafts_on_real_prompts.py --prompts 200 --every-case`.
"""

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app.generation.conversation import Conversation, Json, Message, Tool, ToolUse
from app.generation.events import ChatEvent, GeneratedTokens, PromptProgress, ReplyEnd, ToolCallStart, merge_deltas
from app.generation.grammars import GrammarCompiler, GrammarSource, RequestedGrammar
from app.generation.options import GenerationOptions, ReplyOptions, candidates
from app.generation.service import ChatService
from app.generation.template import ChatTemplateRenderer
from app.generation.thinking_budget import ReasoningMarks, ThinkingBudget
from app.generation.token_streams import TokenStreams
from app.grammars.frames import GrammarText
from app.grammars.host import GrammarProcess
from app.text.tokenizer import Tokenizer
from engine.draft import NO_DRAFT, Draft
from engine.drafting.corpus import LEAD
from engine.drafting.drafter import Drafter
from engine.drafting.plan import Room
from engine.grammar import Grammar
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import PROGRAM, Request
from engine.sampling.masks import PendingMasks
from engine.sampling_params import DryParams
from tests.engine.drafting.forced_replies import drafts_from

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "docs/performance.md", "docs/server.md", "docs/commands.md")
TASKS = (
    "Repeat this text:",
    "Repeat this text, but write every number as a word:",
    "Summarize this text in two sentences:",
    "Write three questions that this text answers:",
    "List the most important words of this text:",
    "Translate this text into French:",
    "Is this text easy to understand? Explain why:",
    "Write a program that this text could describe:",
    "Continue this text:",
    "Explain this text to a child:",
)
LENGTH = 24  # tokens of a reply
TOGETHER = 8  # number of prompts at a time
VOCABULARY = 49152
DRAWN: Mapping[str, object] = {"temperature": 0.8, "top_p": 0.95}
Known = Mapping[tuple[int, ...], Sequence[Sequence[int]]]  # replies by their prompt
Told = Sequence[tuple[int, ChatEvent]]  # all events of a request
NOTE: Json = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 30}, "pages": {"type": "integer"}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
TOOLS = (Tool("save_note", {}, NOTE), Tool("save_draft", {}, NOTE))
THOUGHTS = GrammarSource.choice(["<a limit of reasoning tokens>"])


class CompilerOfThoughts(GrammarCompiler):
    """Compiles THOUGHTS to a limit of reasoning tokens, which the template of this model cannot ask for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        marks = ReasoningMarks.of(tokenizer, ["<think>"], ["</think>"])
        self._thoughts = ThinkingBudget(tokenizer, marks, 12, None, thinks=True)

    async def compile(self, source: GrammarText) -> Grammar:
        return self._thoughts if source == THOUGHTS else await super().compile(source)


@dataclass(frozen=True)
class Asked:
    """The options of a request."""

    sampling: Mapping[str, object]
    grammar: RequestedGrammar | None = None
    tools: Sequence[Tool] = ()
    count: int = 1

    def options(self, seed: int, *, drafts: bool) -> GenerationOptions:
        given = {"max_tokens": LENGTH, **self.sampling, "drafts": drafts}
        return GenerationOptions(
            candidates(given, self.count, seed),
            self.count,
            reports_logprobs="logprobs" in self.sampling,
            grammar=self.grammar,
            reply=ReplyOptions(reports_tokens=True),
        )

    def conversation(self, prompt: str) -> Conversation:
        use = ToolUse.FORCED if self.tools else ToolUse.FREE
        return Conversation([Message("user", prompt)], tools=self.tools, use=use)


CASES: Mapping[str, Asked] = {
    "greedy": Asked({"temperature": 0}),
    "drawn": Asked(DRAWN),
    "penalties": Asked({**DRAWN, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}),
    "dry": Asked({"temperature": 0, "dry": DryParams(2.0)}),
    "xtc": Asked({**DRAWN, "xtc_probability": 0.6, "xtc_threshold": 0.05}),
    "min tokens": Asked({"temperature": 0, "min_tokens": 20}),
    "bias": Asked({**DRAWN, "logit_bias": ((28, 4.0), (30, -100.0))}),
    "schema": Asked(DRAWN, RequestedGrammar(GrammarSource.schema({"type": "array", "items": NOTE}), "grammar")),
    "tools": Asked(DRAWN, tools=TOOLS),
    "thinking budget": Asked(DRAWN, RequestedGrammar(THOUGHTS, "grammar")),
    "log-probabilities": Asked({**DRAWN, "logprobs": 20}),
    "stop strings": Asked({**DRAWN, "stop": (" a", "and", "\n\n", "tion")}),
    "stop strings and a schema": Asked(
        {**DRAWN, "stop": (" a", "an", "},", "tion")},
        RequestedGrammar(GrammarSource.schema({"type": "array", "items": NOTE}), "grammar"),
    ),
    "four choices": Asked(DRAWN, count=4),
}


MOST = 100  # drafted tokens of a step; with one thread, a step has at most 128 tokens


class Forced(Drafter):
    """A drafter whose drafts are all verified, even if steps take long."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: 1.0)

    def choose(self, requests: Sequence[Request], room: Room) -> Mapping[int, Draft]:
        # independent of measured times, on which the room depends
        drafts = {request.id: self.draft(request) for request in requests}
        tokens = itertools.accumulate(len(draft.token_ids) for draft in drafts.values())
        return {
            request_id: draft for (request_id, draft), most in zip(drafts.items(), tokens, strict=True) if most < MOST
        }


class FromCorpus(Forced):
    """Drafts from earlier replies alone."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        for prompt, replies in known.items():
            for reply in replies:
                self._corpora.add(PROGRAM.cache_salt, [*prompt[-LEAD:], *reply])

    def _find(self, followed: Any) -> Draft:
        followed.indexes = ()
        return super()._find(followed)


class Oracle(Forced):
    """Drafts tokens that are made from the true ones, which are known."""

    def __init__(self, known: Known, change: Callable[[int], int], rng: random.Random) -> None:
        super().__init__()
        self._known = known
        self._change = change
        self._random = rng

    def draft(self, request: Request) -> Draft:
        start, replies = len(request.output_ids), self._known[request.prompt_ids]
        # after a stop string, the engine may add tokens that are not part of the reply
        reply = next((it for it in replies if list(it[:start]) == request.output_ids), ())
        coming = reply[start : start + self._random.randrange(1, 9)]
        return replace(NO_DRAFT, token_ids=tuple(map(self._change, coming)))


def drafters(known: Known, rng: random.Random) -> Mapping[str, Forced]:
    """Return the drafters by name, for prompts whose replies are known."""
    return {
        "history": Forced(),
        "corpus": FromCorpus(known),
        "wrong": Oracle(known, lambda token_id: (token_id + 1) % VOCABULARY, rng),
        "right": Oracle(known, lambda token_id: token_id, rng),
        "random": Oracle(known, lambda token_id: rng.choice((token_id, rng.randrange(VOCABULARY))), rng),
    }


def prompts() -> list[str]:
    """Return 200 prompts: ten tasks with twenty paragraphs of the documents each."""
    text = "\n\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    found = [it for it in re.split(r"\n\s*\n", text) if 200 < len(it) < 600 and not it.startswith(("|", "#", "<"))]
    paragraphs = random.Random(1).sample(found, 20)
    return [f"{task}\n\n{paragraph}" for paragraph, task in itertools.product(paragraphs, TASKS)]


@pytest.fixture(autouse=True)
def _independent_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify every draft, however long its masks take."""
    monkeypatch.setattr(GrammarProcess, "masks_within", lambda process, seconds: 100)
    monkeypatch.setattr(PendingMasks, "result", lambda pending: pending._masks.result())


@pytest.fixture
def engine(smollm2: Path, cpu_kernels: Path) -> ModelEngine:
    with open_checkpoint(smollm2) as checkpoint:
        options = LoadOptions(backend="cpu", code_cache=cpu_kernels, context_length=2048)
        return load_engine(checkpoint, options)


def comparable(events: Told, index: int) -> list[object]:
    """Return the events of one reply, without times and random ids."""
    own = [
        (0, event) for at, event in events if at == index and not isinstance(event, GeneratedTokens | PromptProgress)
    ]
    plain: list[object] = []
    for _, event in merge_deltas(own):
        match event:
            case ReplyEnd():
                plain.append((event.finish, event.stop, event.seed, event.completion_tokens))
            case ToolCallStart():
                plain.append((event.index, event.name))
            case _:
                plain.append(event)
    return plain


def tokens(events: Told, index: int) -> list[int]:
    """Return the ids of one reply."""
    return [it for at, event in events if at == index and isinstance(event, GeneratedTokens) for it in event.ids]


@dataclass(frozen=True)
class Asking:
    """One case, asked of one service."""

    service: ChatService
    engine: ModelEngine
    asked: Asked

    async def replies(self, prompts: Sequence[str], *, drafts: bool) -> list[Told]:
        """Return the events of the replies to several prompts, which run at the same time."""
        return await asyncio.gather(*(self._reply(prompt, drafts=drafts) for prompt in prompts))

    async def _reply(self, prompt: str, *, drafts: bool) -> Told:
        seed = random.Random(prompt).getrandbits(32)
        batches = self.service.reply(self.asked.conversation(prompt), self.asked.options(seed, drafts=drafts))
        return [event async for batch in batches for event in batch]

    async def known(self, prompts: Sequence[str], plain: Sequence[Told]) -> Known:
        """Return the tokens of the replies by the tokens of the prompts."""
        numbers = range(self.asked.count)
        return {
            (await self.service.prompt(self.asked.conversation(prompt))).ids: [tokens(told, it) for it in numbers]
            for prompt, told in zip(prompts, plain, strict=True)
        }

    async def check(self, prompts: Sequence[str]) -> Counter[tuple[str, bool]]:
        """Assert that no drafts change the replies. Returns how many of each were accepted, and how many were not."""
        plain = await self.replies(prompts, drafts=False)
        counts = Counter[tuple[str, bool]]()
        for name, drafter in drafters(await self.known(prompts, plain), random.Random(prompts[0])).items():
            with drafts_from(self.engine, drafter):
                found = await self.replies(prompts, drafts=True)
            for prompt, one, other in zip(prompts, found, plain, strict=True):
                for index in range(self.asked.count):
                    assert tokens(one, index) == tokens(other, index), (name, prompt)
                    assert comparable(one, index) == comparable(other, index), (name, prompt)
            for end in (event for told in found for _, event in told if isinstance(event, ReplyEnd)):
                counts[name, True] += end.drafts.accepted
                counts[name, False] += end.drafts.drafted - end.drafts.accepted
        return counts


@pytest.mark.share(1)
@pytest.mark.parametrize("case", CASES)
def test_reply_to_a_real_prompt_is_the_same_with_drafts(
    engine: ModelEngine, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, pytestconfig: pytest.Config, case: str
) -> None:
    count = pytestconfig.getoption("--prompts")
    chosen = random.Random(case).sample(prompts(), count)

    async def main() -> Counter[tuple[str, bool]]:
        service = ChatService("smollm2", tokenizer, TokenStreams(engine), renderer)
        service.grammars = CompilerOfThoughts(tokenizer)
        counts = Counter[tuple[str, bool]]()
        async with service.streams:
            for start in range(0, count, TOGETHER):
                counts += await Asking(service, engine, CASES[case]).check(chosen[start : start + TOGETHER])
        return counts

    counts = asyncio.run(main())
    print(f"{case}: {counts.total()} drafted tokens")
    assert not counts["wrong", True] or CASES[case].count > 1  # a wrong token of one choice may be right in another one
    assert counts["wrong", False] or CASES[case].grammar or CASES[case].tools  # grammars may reject all of them
    assert counts["right", True] > 0
    assert counts["random", True] > 0
