"""Drafter: where drafts come from, and that they never cross cache salts."""

from engine.draft import NO_DRAFT, DraftCounts, Source
from engine.drafting.drafter import Drafter
from engine.drafting.plan import Room
from engine.request import Origin, Request, RequestStatus
from engine.sampling_params import SamplingParams


def request(number: int, prompt: list[int], output: list[int], salt: str = "", **params: object) -> Request:
    made = Request(number, tuple(prompt), SamplingParams(**params), origin=Origin(cache_salt=salt))  # type: ignore[arg-type]
    made.output_ids = output
    return made


def drafter() -> Drafter:
    return Drafter(lambda tokens: 1.0)


def end(drafter: Drafter, request: Request) -> None:
    drafter.draft(request)
    request.status = RequestStatus.FINISHED
    drafter.drop_ended({})


def test_draft_continues_the_prompt_that_the_reply_repeats() -> None:
    draft = drafter().draft(request(1, [10, 11, 12, 13, 14, 15, 99], [10, 11, 12]))
    assert (draft.source, draft.match_length) == (Source.HISTORY, 3)
    assert draft.token_ids == (13, 14, 15, 99, 10, 11)  # twice as many tokens as match


def test_draft_follows_a_growing_reply() -> None:
    made, following = drafter(), request(1, [1, 2, 3, 4, 5, 6, 7, 8], [50])
    assert made.draft(following) is NO_DRAFT
    for token_id, length in ((2, 0), (3, 0), (4, 3), (5, 4), (6, 5)):
        following.output_ids.append(token_id)
        assert made.draft(following).match_length == length
    following.output_ids.append(77)
    assert made.draft(following) is NO_DRAFT


def test_predicted_reply_is_drafted() -> None:
    draft = drafter().draft(request(1, [1, 2], [30, 31, 32], prediction=(30, 31, 32, 33, 34)))
    assert (draft.source, draft.token_ids) == (Source.PREDICTION, (33, 34))


def test_earlier_reply_with_the_same_salt_is_drafted_from_its_start() -> None:
    """A regenerated reply: its first tokens follow the same prompt."""
    made = drafter()
    end(made, request(1, [1, 2, 3], [20, 21, 22, 23], salt="a"))
    draft = made.draft(request(2, [7, 8, 1, 2, 3], [20], salt="a"))
    assert (draft.source, draft.token_ids[:3]) == (Source.CORPUS, (21, 22, 23))
    assert made.draft(request(3, [7, 8, 1, 2, 3], [20], salt="b")) is NO_DRAFT
    assert made.draft(request(4, [7, 8, 1, 2, 3], [20])) is NO_DRAFT


def test_forgotten_replies_are_not_drafted() -> None:
    made = drafter()
    end(made, request(1, [1, 2, 3], [20, 21, 22, 23]))
    made.forget([], Origin(), kept=0)
    assert made.draft(request(2, [1, 2, 3], [20])) is NO_DRAFT


def test_preempted_request_is_still_followed() -> None:
    made, following = drafter(), request(1, [1, 2, 3, 4], [1, 2, 3])
    before = made.draft(following)
    following.status = RequestStatus.WAITING
    made.drop_ended({})
    assert made.draft(following) is before


def test_draft_is_expected_after_the_token_that_is_being_sampled() -> None:
    made = drafter()
    assert made.expects_draft(request(1, [10, 11, 12, 13, 14], [10, 11, 12]))
    assert not made.expects_draft(request(2, [10, 11, 12, 13, 14], [13]))
    slow = Drafter(float)
    assert not slow.expects_draft(request(3, [10, 11, 12, 13, 14], [10, 11, 12]))


def test_request_that_is_launched_ahead_beside_others_has_no_drafts() -> None:
    """It would miss every second step."""
    made, drafting = drafter(), request(1, [10, 11, 12, 13, 14], [10, 11, 12])
    assert made.choose([drafting], Room(decoding=2, most=8))
    assert not made.choose([drafting], Room(decoding=2, most=8, ahead=True))


def test_run_length_excludes_accepted_drafts() -> None:
    made, following = drafter(), request(1, [1, 2, 3], [9])
    made.draft(following)
    for new, accepted in (([1], 0), ([5, 6, 7], 0), ([1, 2, 3, 4], 3), ([8], 0)):
        following.output_ids += new
        following.drafts += DraftCounts(accepted, accepted)
        made.draft(following)
    assert made._followed[1].run_length == (1 + 1 + 3 + 1 + 1) / 5


def test_estimates_follow_the_sampled_tokens_although_no_draft_was_verified() -> None:
    made, following = drafter(), request(1, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3])
    chance = made.acceptance.chance(Source.HISTORY, 3)
    made.draft(following)
    following.output_ids.append(4)
    made.draft(following)
    assert made.acceptance.chance(Source.HISTORY, 3) > chance
