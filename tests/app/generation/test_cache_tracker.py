"""Every reason of a miss, with texts as the default model's vocabulary encodes them."""

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


class Asked:
    """What was asked and answered, and is computed but for the last token of each reply."""

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
        """Of a prompt of which all is found that can be, unless told otherwise."""
        earlier = self.earlier(prompt, salt)
        if use is None:
            use = TokenSources(device=0 if earlier is None else findable(prompt, earlier))
        return find_miss(packed(prompt), earlier, use, self.tokenizer)


def findable(prompt: Sequence[int], earlier: Earlier) -> int:
    return min(earlier.common, earlier.exchange.computed, len(prompt) - 1) // 16 * 16


@pytest.fixture
def asked(tokenizer: Tokenizer) -> Asked:
    return Asked(tokenizer)


def test_a_prompt_that_goes_on_has_no_miss(asked: Asked) -> None:
    prompt, reply = asked.ids(SYSTEM + QUESTION + BEGIN), asked.ids(ANSWER + END)
    asked.answer(prompt, reply)
    assert asked.miss([*prompt, *reply, *asked.ids(NEXT + "many words " * 100)]) is None
    assert asked.miss(prompt) is None  # the same again
    assert asked.miss(prompt[:40]) is None


def test_a_prompt_that_shares_a_beginning_has_no_miss_if_that_is_most_of_it(asked: Asked) -> None:
    shared = SYSTEM + "The weather is fine. " * 30 + END
    asked.answer(asked.ids(shared + QUESTION + BEGIN), asked.ids(ANSWER + END))
    assert asked.miss(asked.ids(shared + "\n<|im_start|>user\nHow old is the moon?<|im_end|>\n" + BEGIN)) is None


def test_the_first_time(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    assert asked.miss(prompt) == Miss(MissReason.FIRST_TIME, 0)
    asked.answer(prompt, asked.ids(ANSWER + END))
    other = asked.ids(SYSTEM + "<|im_start|>user\n" + "Sing of arms and a man. " * 20 + END + BEGIN)
    earlier = asked.earlier(other)
    assert earlier is not None
    assert asked.miss(other) == Miss(MissReason.FIRST_TIME, earlier.common)
    assert asked.miss(prompt, salt="another") == Miss(MissReason.FIRST_TIME, 0)


def test_what_was_found_from_before_the_start_is_no_miss(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    assert asked.miss(prompt, TokenSources(disk=len(prompt) // 16 * 16)) is None


def test_a_changed_beginning(asked: Asked) -> None:
    """As of a prompt with the time in it."""
    texts = [f"<|im_start|>system\nIt is Monday, {time} o'clock. Be brief.<|im_end|>\n" for time in ("nine", "ten")]
    asked.answer(asked.ids(texts[0] + QUESTION + BEGIN), asked.ids(ANSWER + END))
    prompt = asked.ids(texts[1] + QUESTION + BEGIN)
    miss = asked.miss(prompt)
    assert miss is not None
    assert miss.reason is MissReason.DIVERGED
    assert asked.tokenizer.decode(prompt[: miss.position]).endswith("Monday,")
    assert miss.before == "<|im_start|>system\nIt is Monday,"
    assert miss.was.startswith(" nine o'clock. Be")
    assert miss.now.startswith(" ten o'clock. Be")
    assert miss.removed == ""


def test_an_edited_reply(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    asked.answer(prompt, asked.ids("Paris; the Seine." + END))
    miss = asked.miss([*prompt, *asked.ids("Paris; the Loire." + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.was[:7], miss.now[:7]) == (MissReason.DIVERGED, " Seine.", " Loire.")
    assert miss.before.endswith("assistant\nParis; the")


@pytest.mark.parametrize("answer", [ANSWER, ANSWER * 10, "Yes"])
def test_thinking_that_the_template_takes_out(asked: Asked, answer: str) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    asked.answer(prompt, asked.ids(THOUGHT + answer + END))
    miss = asked.miss([*prompt, *asked.ids(answer + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.position, miss.removed) == (MissReason.REMOVED, len(prompt), THOUGHT)
    assert miss.was.startswith("<think>\nThe user")
    assert miss.now.startswith(answer[:3])


def test_thinking_of_a_turn_long_ago(asked: Asked) -> None:
    first = asked.ids(SYSTEM + QUESTION + BEGIN)
    second = [*first, *asked.ids(THOUGHT + ANSWER + END + NEXT)]
    asked.answer(second, asked.ids("Rome, and very old." + END))
    miss = asked.miss([*first, *asked.ids(ANSWER + END + NEXT), *asked.ids("Rome, and very old." + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.position, miss.removed) == (MissReason.REMOVED, len(first), THOUGHT)


def test_a_long_part_is_named_by_its_ends(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    thought = "<think>\n" + "It goes on and on. " * 500 + "\n</think>\n\n"
    asked.answer(prompt, asked.ids(thought + ANSWER + END))
    miss = asked.miss([*prompt, *asked.ids(ANSWER + END + NEXT)])
    assert miss is not None
    head, tail = miss.removed.split(" … ")
    assert thought.startswith(head)
    assert thought.endswith(tail)
    assert 100 < len(miss.removed) < 400


@pytest.mark.parametrize(("reply", "kept"), [("\n\nParis it is.", "Paris it is."), (" Paris it is.", "Paris it is.")])
def test_white_space_that_is_taken_out(asked: Asked, reply: str, kept: str) -> None:
    """Behind which the first word may be encoded as another token."""
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    asked.answer(prompt, asked.ids(reply + END))
    miss = asked.miss([*prompt, *asked.ids(kept + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.removed) == (MissReason.REMOVED, reply.removesuffix(kept))


def test_a_word_in_place_of_another_is_no_part_that_was_removed(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    asked.answer(prompt, asked.ids("one cat and a dog sit on the mat by the door" + END))
    miss = asked.miss([*prompt, *asked.ids("one cow and a dog sit on the mat by the door" + END + NEXT)])
    assert miss is not None
    assert (miss.reason, miss.was[:4], miss.now[:4]) == (MissReason.DIVERGED, " cat", " cow")


def test_ids_are_compared_as_a_whole(asked: Asked) -> None:
    """And not the bytes of two neighbours."""
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    asked.answer(prompt, [256] * 40)
    miss = asked.miss([*prompt, *[1] * 40])
    assert miss is not None
    assert (miss.reason, miss.position) == (MissReason.DIVERGED, len(prompt))


def test_what_is_not_there_any_more(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    reply = asked.ids(ANSWER * 10 + END)
    asked.answer(prompt, reply)
    longer = [*prompt, *reply, *asked.ids(NEXT)]
    earlier = asked.earlier(longer)
    assert earlier is not None
    most = findable(longer, earlier)
    assert most >= 64
    assert asked.miss(longer, TokenSources(device=most)) is None
    assert asked.miss(longer, TokenSources(device=16, host=most - 48, disk=16)) == Miss(MissReason.EVICTED, most - 16)
    assert asked.miss(longer, TokenSources()) == Miss(MissReason.EVICTED, 0)


def test_what_was_never_computed_is_not_evicted(asked: Asked) -> None:
    """As of a request that ended while its prompt was read, or of one that is still waiting."""
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)[:35]
    asked.recent.remember(Exchange("", packed(prompt), len(prompt), computed=17))
    assert asked.miss(prompt, TokenSources(device=16)) == Miss(MissReason.FIRST_TIME, 17)
    assert asked.miss(prompt, TokenSources(device=32)) is None  # whoever computed it meanwhile
    assert asked.miss(prompt, TokenSources()) == Miss(MissReason.EVICTED, 0)


@pytest.mark.parametrize(("tokens", "most"), [(32, 16), (33, 32)])
def test_the_last_token_of_a_prompt_is_never_found(asked: Asked, tokens: int, most: int) -> None:
    prompt = asked.ids(SYSTEM + QUESTION)[:tokens]
    asked.answer(prompt, asked.ids(ANSWER))
    assert asked.miss(prompt, TokenSources(device=most)) is None


def test_what_is_faster_computed_than_read(asked: Asked) -> None:
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    assert asked.miss(prompt, TokenSources(device=16, skipped=32)) == Miss(MissReason.RECOMPUTED, 16)


def test_no_character_is_cut_in_two(asked: Asked) -> None:
    """Whose bytes are tokens of their own, some of which are the same on both sides."""
    prompt = asked.ids(SYSTEM + QUESTION + BEGIN)
    cut = 0
    for number in range(0x1F980, 0x1F9C0):
        old, new = ([*prompt, *asked.ids(f"{chr(number + more)}\u2603 \u4e16\u754c" * 3 + END)] for more in (0, 1))
        asked.recent = RecentPrompts()
        asked.answer(old[: len(prompt)], old[len(prompt) :])
        miss = asked.miss([*new, *asked.ids(NEXT)])
        assert miss is not None
        told = (miss.before, miss.was, miss.now, miss.removed)
        assert not any("\ufffd" in text for text in told)
        assert miss.reason is MissReason.DIVERGED
        assert miss.was.startswith(chr(number))
        assert miss.now.startswith(chr(number + 1))
        cut += miss.position > len(prompt)
    assert cut > 32
