"""A reply with a grammar is the same with drafts and without: tokens, log-probabilities, and how it ends."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from app.generation.conversation import Json, Tool
from app.generation.grammars import GrammarCompiler, GrammarSource
from app.generation.thinking_budget import ReasoningMarks, ThinkingBudget
from app.generation.token_filter import TokenFilter
from app.generation.tool_parsers.formats import CALLS
from app.generation.tool_parsers.reply_format import ReplyFormat
from app.generation.tool_parsers.reply_grammar import call_grammar
from app.grammars.host import GrammarProcess
from app.text.tokenizer import Tokenizer
from engine.draft import DraftCounts
from engine.grammar import Grammar
from engine.load_options import LoadOptions
from engine.loading import ModelEngine, load_engine, open_checkpoint
from engine.request import FinishReason
from engine.sampling.masks import MaskThread, PendingMasks
from engine.sampling_params import SamplingParams
from engine.step import ScheduledRequest
from tests.engine.drafting.forced_replies import Reply, replies, replies_with_forced_drafts, without_drafts
from tests.support.first_layers import write_first_layers
from tests.support.gguf_reader import Reader

LENGTH = 32  # tokens of a reply
TREE: Mapping[str, Json] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "height": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["oak", "pine", "old birch"]},
    },
    "required": ["name", "height", "kind"],
    "additionalProperties": False,
}
TREES = GrammarSource.schema({"type": "array", "items": TREE, "minItems": 4})
LINES = GrammarSource("regex", r"(row [0-9]: (left|right|straight on)\n){2,20}end")
TOOLS = [Tool("plant_tree", {}, TREE), Tool("list_trees", {}, {"type": "object", "additionalProperties": False})]
SAMPLING: Mapping[str, Mapping[str, object]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "min_tokens": 10},
    "log-probabilities": {"temperature": 0.8, "logprobs": 5},
    "drawn log-probabilities": {"temperature": 0.8, "top_p": 0.9, "logprobs": 3, "drawn_logprobs": True},
}
GRAMMARS = ("schema", "lines", "tools", "filter", "filtered schema", "thoughts", "thoughts and schema")


@pytest.fixture(autouse=True)
def _independent_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify every draft, although computing its masks takes longer than a step of such a small model."""
    monkeypatch.setattr(GrammarProcess, "masks_within", lambda process, seconds: 100)
    monkeypatch.setattr(PendingMasks, "result", lambda pending: pending._masks.result())


@pytest.fixture(scope="module")
def engines(smollm2: Path, tmp_path_factory: pytest.TempPathFactory, cpu_kernels: Path) -> Callable[[str], ModelEngine]:
    """Return a function that loads the first two layers of a model on a backend."""
    path = tmp_path_factory.mktemp("short") / "smollm2.gguf"
    write_first_layers(Reader(smollm2), path, 2)
    loaded: dict[str, ModelEngine] = {}

    def engine(backend: str) -> ModelEngine:
        if backend not in loaded:
            with open_checkpoint(path) as checkpoint:
                loaded[backend] = load_engine(
                    checkpoint, LoadOptions(backend=backend, code_cache=cpu_kernels, context_length=1024)
                )
        return loaded[backend]

    return engine


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Mapping[str, Grammar]:
    compiler = GrammarCompiler(tokenizer)

    def compiled(source: GrammarSource) -> Grammar:
        return asyncio.run(compiler.compile(source))

    calls = next(syntax for syntax in CALLS if syntax.name == "hermes")
    call = call_grammar(ReplyFormat(calls=calls), "", TOOLS, tokenizer.control_tokens, parallel=True, thinks=False)
    marks = ReasoningMarks.of(tokenizer, ["<think>"], ["</think>"])
    trees = compiled(TREES)
    forbidden = [tokenizer.encode(word) for word in ("name", "height", "a b")]
    return {
        "schema": trees,
        "lines": compiled(LINES),
        "tools": compiled(GrammarSource("lark", call)),
        "filter": TokenFilter(frozenset(range(300, 400)), [(310, 311), (320,)]),
        "filtered schema": TokenFilter(None, forbidden, trees),
        "thoughts": ThinkingBudget(tokenizer, marks, 15, None, thinks=True),
        "thoughts and schema": ThinkingBudget(tokenizer, marks, 9, trees, thinks=False),
    }


def several(grammar: Grammar, prompt: str, count: int, **params: object) -> list[SamplingParams]:
    """Return parameters of several choices. Each has its own seed."""
    rng = random.Random(prompt)
    wanted: dict[str, object] = {"max_tokens": LENGTH, "grammar": grammar, **params}
    return [SamplingParams(**wanted, seed=rng.getrandbits(32)) for _ in range(count)]  # type: ignore[arg-type]


def check(
    engine: ModelEngine, tokenizer: Tokenizer, prompt: str, wanted: list[SamplingParams], right: float
) -> tuple[list[Reply], DraftCounts]:
    """Assert that drafts do not change the replies. Returns the replies, and what was drafted and accepted."""
    ids, (end, *_) = tuple(tokenizer.encode(prompt)), tokenizer.end_of_generation_ids
    plain = replies(engine, ids, [without_drafts(it) for it in wanted], end)
    found, counts = replies_with_forced_drafts(engine, ids, wanted, plain, right, random.Random(prompt), end)
    assert found == plain
    assert counts.drafted > 0 or right < 1
    assert counts.accepted > 0 or right < 0.9
    return plain, counts


@pytest.mark.share(1, "grammar")
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_reply_with_a_grammar_is_the_same_with_drafts(
    engines: Callable[[str], ModelEngine],
    grammars: Mapping[str, Grammar],
    tokenizer: Tokenizer,
    grammar: str,
    backend: str,
    sampling: str,
    right: float,
) -> None:
    """Three choices of one prompt, each with its own state of the grammar."""
    prompt = f"{grammar} {sampling} {right}: a list of trees"
    wanted = several(grammars[grammar], prompt, 3, **SAMPLING[sampling])
    check(engines(backend), tokenizer, prompt, wanted, right)


@pytest.mark.parametrize("grammar", ["schema", "lines", "tools", "filtered schema"])
def test_right_drafts_are_accepted_with_their_forced_tokens(
    engines: Callable[[str], ModelEngine], grammars: Mapping[str, Grammar], tokenizer: Tokenizer, grammar: str
) -> None:
    """No draft includes the end of a reply, so that right ones are accepted completely."""
    wanted = several(grammars[grammar], "Trees:", 1, temperature=1.0)
    _, counts = check(engines("cpu"), tokenizer, "Trees:", wanted, 1.0)
    assert counts.accepted == counts.drafted


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_late_masks_do_not_change_replies(
    engines: Callable[[str], ModelEngine],
    grammars: Mapping[str, Grammar],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    right: float,
) -> None:
    """No step waits for the masks of its drafts, so most are late."""
    start = MaskThread.start

    def started(masks: MaskThread, parts: Sequence[ScheduledRequest]) -> PendingMasks | None:
        pending = start(masks, parts)
        if pending is not None:
            pending._is_late.set()
        return pending

    monkeypatch.setattr(MaskThread, "start", started)
    for sampling in ("greedy", "log-probabilities"):
        params = SAMPLING[sampling]
        wanted, ids = several(grammars["schema"], "Trees:", 2, **params), tuple(tokenizer.encode("Trees:"))
        plain = replies(engines("cpu"), ids, [without_drafts(it) for it in wanted])
        found, counts = replies_with_forced_drafts(engines("cpu"), ids, wanted, plain, right, random.Random(right))
        assert found == plain
        assert counts.drafted > counts.accepted


@pytest.mark.parametrize("text", ["yes", "perhaps tomorrow", "a fixed text, and then its end."])
def test_grammar_may_end_within_a_draft(engines: Callable[[str], ModelEngine], tokenizer: Tokenizer, text: str) -> None:
    """The draft continues after the end of the grammar."""
    compiler = GrammarCompiler(tokenizer)
    grammar = asyncio.run(compiler.compile(GrammarSource("regex", f"({text[0]}[^z]{{0,9}}|{text})z")))
    for jumps in (True, False):
        params = {"temperature": 1.0, "logprobs": None if jumps else 0}
        for reply in check(engines("cpu"), tokenizer, text, several(grammar, text, 4, **params), 1.0)[0]:
            assert reply.finish is FinishReason.STOP


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7])
def test_max_tokens_may_be_reached_within_a_draft(
    engines: Callable[[str], ModelEngine], grammars: Mapping[str, Grammar], tokenizer: Tokenizer, most: int
) -> None:
    prompt = "Trees:"
    wanted = several(grammars["schema"], prompt, 2, temperature=1.0, max_tokens=most)
    ids = tuple(tokenizer.encode(prompt))
    plain = replies(engines("cpu"), ids, [without_drafts(it) for it in wanted])
    found, _ = replies_with_forced_drafts(engines("cpu"), ids, wanted, plain, 1.0, random.Random(most))
    assert found == plain
    assert all(len(it.token_ids) == most and it.finish is FinishReason.LENGTH for it in found)


def test_stop_token_may_be_within_a_draft(
    engines: Callable[[str], ModelEngine], grammars: Mapping[str, Grammar], tokenizer: Tokenizer
) -> None:
    prompt = "Trees:"
    ids = tuple(tokenizer.encode(prompt))
    for_all = replies(engines("cpu"), ids, several(grammars["lines"], prompt, 3, temperature=1.0, drafts=False))
    for stop in {it.token_ids[index] for it in for_all for index in (2, 5, 9)}:
        check(
            engines("cpu"),
            tokenizer,
            prompt,
            several(grammars["lines"], prompt, 3, temperature=1.0, stop_token_ids=(stop,)),
            0.5,
        )
