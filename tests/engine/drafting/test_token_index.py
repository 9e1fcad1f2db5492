"""TokenIndex against a search of the whole sequence."""

import random

from engine.drafting.token_index import END, KEY, MAX_CANDIDATES, MAX_MATCH, TokenIndex


def index_of(token_ids: list[int]) -> TokenIndex:
    index = TokenIndex()
    index.extend(token_ids)
    return index


def match_length(token_ids: list[int], position: int, suffix: list[int]) -> int:
    length = 0
    while (
        length < min(position, len(suffix), MAX_MATCH)
        and token_ids[position - 1 - length] == suffix[-1 - length] != END
    ):
        length += 1
    return length


def test_match_is_the_longest_of_the_latest_candidates() -> None:
    rng = random.Random(5)
    found = 0
    for _ in range(400):
        token_ids = [rng.randrange(4) for _ in range(rng.randrange(0, 80))]
        suffix = token_ids if rng.random() < 0.5 else [rng.randrange(4) for _ in range(rng.randrange(0, 12))]
        match = index_of(token_ids).match(suffix)
        lengths = {at: match_length(token_ids, at, suffix) for at in range(KEY, len(token_ids))}
        candidates = [at for at in sorted(lengths, reverse=True) if lengths[at] >= KEY][:MAX_CANDIDATES]
        if not candidates:
            assert match is None
            continue
        found += 1
        assert match is not None
        assert match.length == max(lengths[at] for at in candidates)
        assert match.position == next(at for at in candidates if lengths[at] == match.length)
    assert found > 100


def test_growing_step_by_step_gives_the_same_matches() -> None:
    rng = random.Random(6)
    token_ids = [rng.randrange(3) for _ in range(200)]
    growing = TokenIndex()
    for stop in range(1, len(token_ids) + 1):
        growing.extend(token_ids[stop - 1 : stop])
        assert growing.match(token_ids[:stop]) == index_of(token_ids[:stop]).match(token_ids[:stop])


def test_draft_of_a_repetition_continues_into_itself() -> None:
    index = index_of([9, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    match = index.match(index.token_ids)
    assert match is not None
    assert index.tokens_after(match, 8, repeats=True) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert index.tokens_after(match, 8, repeats=False) == (1, 2, 3)[: len(index) - match.position]


def test_no_match_and_no_draft_spans_two_texts() -> None:
    index = index_of([1, 2, 3, 4, 5, END, 3, 4, 5, 6, 7])
    match = index.match([9, 2, 3, 4])
    assert match is not None
    assert (match.length, index.tokens_after(match, 5, repeats=False)) == (3, (5,))
    match = index.match([1, 2, 3, 4, 5])
    assert match is not None
    assert match.length == 3  # the tokens before END belong to another text
    assert index.match([5, END, 3]) is None
