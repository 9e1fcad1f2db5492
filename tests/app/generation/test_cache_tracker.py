"""Tests of every reason for a cache miss, with texts in the default model's vocabulary."""

from collections.abc import Sequence

import pytest

from app.generation.cache_report import Miss, MissReason
from app.generation.cache_tracker import find_miss
from app.generation.recent_prompts import Earlier, Exchange, RecentPrompts, packed
from app.text.tokenizer import Tokenizer
from engine.request import TokenSources

SYSTEM = "<|im_start|>system\nYou are a helpful assistant who answers in few words.<|im_end|>\n"
QUESTION = "<|im_start|>user\nWhat is the capital of France, and which river runs through it?<|im_end|>\n"
BEGIN, END = "<|im_start|>assistant\n", "<|im_end|>"
THOUGHT = "<think>\nThe user asks for a city and a river. It must be Paris, and the Seine.\n</think>\n\n"
ANSWER = "Paris; the Seine."
NEXT = "\n<|im_start|>user\nAnd of Italy? Tell me its age, too.<|im_end|>\n" + BEGIN


class History:
    """Records earlier exchanges. All tokens of a reply except the last one are computed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.recent = RecentPrompts()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, parse_special=True)

    def answer(self, prompt: Sequence[int], reply: Sequence[int], salt: str = "") -> None:
        ids = [*prompt, *reply]
        self.recent.remember(Exchange(salt, packed(ids), len(prompt), len(ids) - 1))

    def earlier(self, prompt: Sequence[int], salt: str = "") -> Earlier | None:
        return self.recent.nearest(packed(prompt), salt)

    def miss(self, prompt: Sequence[int], use: TokenSources | None = None, salt: str = "") -> Miss | None:
        """Return the miss of a prompt. By default, every block that can be cached is cached."""
        earlier = self.earlier(prompt, salt)
        if use is None:
            use = TokenSources(device=0 if earlier is None else findable(prompt, earlier))
        return find_miss(packed(prompt), earlier, use, self.tokenizer)


def findable(prompt: Sequence[int], earlier: Earlier) -> int:
    return min(earlier.common, earlier.exchange.computed, len(prompt) - 1) // 16 * 16


@pytest.fixture
def history(tokenizer: Tokenizer) -> History:
    return History(tokenizer)


def test_continued_prompt_has_no_miss(history: History) -> None:
    prompt, reply = history.ids(SYSTEM + QUESTION + BEGIN), history.ids(ANSWER + END)
    history.answer(prompt, reply)
    assert history.miss([*prompt, *reply, *history.ids(NEXT + "many words " * 100)]) is None
    assert history.miss(prompt) is None  # the same prompt again
    assert history.miss(prompt[:40]) is None


def test_prompt_with_long_shared_prefix_has_no_miss(history: History) -> None:
    shared = SYSTEM + "The weather is fine. " * 30 + END
    history.answer(history.ids(shared + QUESTION + BEGIN), history.ids(ANSWER + END))
    assert history.miss(history.ids(shared + "\n<|im_start|>user\nHow old is the moon?<|im_end|>\n" + BEGIN)) is None


def test_miss_of_a_new_prompt_is_reported_as_first_time(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    assert history.miss(prompt) == Miss(MissReason.FIRST_TIME, 0)
    history.answer(prompt, history.ids(ANSWER + END))
    other = history.ids(SYSTEM + "<|im_start|>user\n" + "Sing of arms and a man. " * 20 + END + BEGIN)
    earlier = history.earlier(other)
    assert earlier is not None
    assert history.miss(other) == Miss(MissReason.FIRST_TIME, earlier.common)
    assert history.miss(prompt, salt="another") == Miss(MissReason.FIRST_TIME, 0)


def test_prefix_cached_before_start_has_no_miss(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    assert history.miss(prompt, TokenSources(disk=len(prompt) // 16 * 16)) is None


def test_changed_system_message_is_reported_as_diverged(history: History) -> None:
    """The system message contains the time of day."""
    texts = [f"<|im_start|>system\nIt is Monday, {time} o'clock. Be brief.<|im_end|>\n" for time in ("nine", "ten")]
    history.answer(history.ids(texts[0] + QUESTION + BEGIN), history.ids(ANSWER + END))
    prompt = history.ids(texts[1] + QUESTION + BEGIN)
    miss = history.miss(prompt)
    assert miss is not None
    assert miss.reason is MissReason.DIVERGED
    assert history.tokenizer.decode(prompt[: miss.position]).endswith("Monday,")
    assert miss.before == "<|im_start|>system\nIt is Monday,"
    assert miss.was.startswith(" nine o'clock. Be")
    assert miss.now.startswith(" ten o'clock. Be")
    assert miss.removed == ""


def test_edited_reply_is_reported_as_diverged(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    history.answer(prompt, history.ids("Paris; the Seine." + END))
    miss = history.miss([*prompt, *history.ids("Paris; the Loire." + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.was[:7], miss.now[:7]) == (MissReason.DIVERGED, " Seine.", " Loire.")
    assert miss.before.endswith("assistant\nParis; the")


@pytest.mark.parametrize("answer", [ANSWER, ANSWER * 10, "Yes"])
def test_dropped_reasoning_is_reported_as_removed(history: History, answer: str) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    history.answer(prompt, history.ids(THOUGHT + answer + END))
    miss = history.miss([*prompt, *history.ids(answer + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.position, miss.removed) == (MissReason.REMOVED, len(prompt), THOUGHT)
    assert miss.was.startswith("<think>\nThe user")
    assert miss.now.startswith(answer[:3])


def test_dropped_reasoning_of_earlier_turn_is_reported_as_removed(history: History) -> None:
    first = history.ids(SYSTEM + QUESTION + BEGIN)
    second = [*first, *history.ids(THOUGHT + ANSWER + END + NEXT)]
    history.answer(second, history.ids("Rome, and very old." + END))
    miss = history.miss([*first, *history.ids(ANSWER + END + NEXT), *history.ids("Rome, and very old." + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.position, miss.removed) == (MissReason.REMOVED, len(first), THOUGHT)


def test_long_removed_text_is_shortened(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    thought = "<think>\n" + "It goes on and on. " * 500 + "\n</think>\n\n"
    history.answer(prompt, history.ids(thought + ANSWER + END))
    miss = history.miss([*prompt, *history.ids(ANSWER + END + NEXT)])
    assert miss is not None
    head, tail = miss.removed.split(" … ")
    assert thought.startswith(head)
    assert thought.endswith(tail)
    assert 100 < len(miss.removed) < 400


@pytest.mark.parametrize(("reply", "kept"), [("\n\nParis it is.", "Paris it is."), (" Paris it is.", "Paris it is.")])
def test_dropped_white_space_is_reported_as_removed(history: History, reply: str, kept: str) -> None:
    """Without the white space, the first word may be encoded as another token."""
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    history.answer(prompt, history.ids(reply + END))
    miss = history.miss([*prompt, *history.ids(kept + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.removed) == (MissReason.REMOVED, reply.removesuffix(kept))


def test_replaced_word_is_not_reported_as_removed(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    history.answer(prompt, history.ids("one cat and a dog sit on the mat by the door" + END))
    miss = history.miss([*prompt, *history.ids("one cow and a dog sit on the mat by the door" + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.was[:4], miss.now[:4]) == (MissReason.DIVERGED, " cat", " cow")


def test_ids_are_compared_at_id_boundaries(history: History) -> None:
    """Equal bytes that start in the middle of an id are no match."""
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    history.answer(prompt, [256] * 40)
    miss = history.miss([*prompt, *[1] * 40])
    assert miss is not None
    assert (miss.reason, miss.position) == (MissReason.DIVERGED, len(prompt))


def test_missing_blocks_are_reported_as_evicted(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    reply = history.ids(ANSWER * 10 + END)
    history.answer(prompt, reply)
    longer = [*prompt, *reply, *history.ids(NEXT)]
    earlier = history.earlier(longer)
    assert earlier is not None
    most = findable(longer, earlier)
    assert most >= 64
    assert history.miss(longer, TokenSources(device=most)) is None
    assert history.miss(longer, TokenSources(device=16, host=most - 48, disk=16)) == Miss(MissReason.EVICTED, most - 16)
    assert history.miss(longer, TokenSources()) == Miss(MissReason.EVICTED, 0)


def test_uncomputed_tokens_are_not_reported_as_evicted(history: History) -> None:
    """The request ended during its prefill, or is still waiting."""
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)[:35]
    history.recent.remember(Exchange("", packed(prompt), len(prompt), computed=17))
    assert history.miss(prompt, TokenSources(device=16)) == Miss(MissReason.FIRST_TIME, 17)
    assert history.miss(prompt, TokenSources(device=32)) is None  # another request computed the blocks in the meantime
    assert history.miss(prompt, TokenSources()) == Miss(MissReason.EVICTED, 0)


@pytest.mark.parametrize(("tokens", "most"), [(32, 16), (33, 32)])
def test_last_prompt_token_is_never_cached(history: History, tokens: int, most: int) -> None:
    prompt = history.ids(SYSTEM + QUESTION)[:tokens]
    history.answer(prompt, history.ids(ANSWER))
    assert history.miss(prompt, TokenSources(device=most)) is None


def test_skipped_disk_blocks_are_reported_as_recomputed(history: History) -> None:
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    assert history.miss(prompt, TokenSources(device=16, skipped=32)) == Miss(MissReason.RECOMPUTED, 16)


def test_excerpts_contain_whole_characters(history: History) -> None:
    """Each byte of the characters is a token, and some of these tokens are the same in both texts."""
    prompt = history.ids(SYSTEM + QUESTION + BEGIN)
    cut = 0
    for number in range(0x1F980, 0x1F9C0):
        old, new = ([*prompt, *history.ids(f"{chr(number + more)}\u2603 \u4e16\u754c" * 3 + END)] for more in (0, 1))
        history.recent = RecentPrompts()
        history.answer(old[: len(prompt)], old[len(prompt) :])
        miss = history.miss([*new, *history.ids(NEXT)])
        assert miss is not None
        told = (miss.before, miss.was, miss.now, miss.removed)
        assert not any("\ufffd" in text for text in told)
        assert miss.reason is MissReason.DIVERGED
        assert miss.was.startswith(chr(number))
        assert miss.now.startswith(chr(number + 1))
        cut += miss.position > len(prompt)
    assert cut > 32
