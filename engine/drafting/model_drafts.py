"""ModelDrafts: decides when a draft model drafts, for which requests, and how many tokens.

Its drafts cost time before their quality is known. They are made if the expected tokens per second, with the time of
drafting included, are higher than without. Otherwise a single token is drafted from time to time, to notice when the
model would be worth its time: such trials take at most TRIAL_SHARE of the time of decoding.
"""

from collections.abc import Callable, Mapping, Sequence

from engine.config import BLOCK_SIZE
from engine.draft import Draft
from engine.drafting.acceptance import MAX_DRAFT, WEIGHT, Acceptance
from engine.drafting.draft_model import DraftModel
from engine.drafting.plan import DraftPlan, Room, best_count
from engine.request import Origin, Request

PRIOR = 0.6  # assumed acceptance of a drafted token before anything was observed
TRIAL_SHARE = 0.01
REPLY_TOKENS = 100  # number of further tokens over which the time for prefilling a prompt is spread
ALONE = Room(decoding=1, most=MAX_DRAFT)  # the room of a request that runs alone
PREFILL_SHARE = (
    0.5  # time of a chunk of a prompt that the draft model prefills in a step, as a share of the step's time
)


class ModelDrafts:
    """The drafts of one draft model, and what was learned from them."""

    def __init__(self, model: DraftModel, acceptance: Acceptance, seconds: Callable[[int], float]) -> None:
        """`seconds` returns the expected time of the large model's step by its number of tokens."""
        self._model = model
        self._acceptance = acceptance
        self._seconds = seconds
        self._chance = PRIOR  # acceptance of drafted tokens, given that all before them were right
        self._since_trial = 0.0  # seconds of decoding since the model last drafted
        self._made: dict[int, tuple[int, Draft]] = {}  # request id -> number of tokens before its last draft, the draft

    def choose(self, requests: Sequence[Request], plan: DraftPlan, room: Room) -> Mapping[int, Draft]:
        """Return drafts for requests, by request id; none if the drafts of `plan` are expected to be faster."""
        self._observe(requests)
        self._since_trial += self._seconds(room.known)
        # Shadows take some time, so they are left alone if drafts would not pay even without a prompt to prefill.
        if not requests or not self._depth(len(requests), 0, plan.rate, room):
            return {}
        able = [request for request in requests if self._model.can_follow(request)]
        missing = {request.id: self._model.num_missing(request) for request in able}
        depth = self._depth(len(able), sum(missing.values()) - len(able), plan.rate, room) if able else 0
        if not depth:
            return {}
        chunk = self._chunk(room)
        late = [request for request in able if missing[request.id] > chunk]
        if late:
            self._model.prefill(late[0], chunk)
        ready = [request for request in able if missing[request.id] <= chunk]
        return self._draft(ready, depth, self._least(len(ready), plan.rate, room)) if ready else {}

    def expects_draft(self, request: Request) -> bool:
        """Whether a draft for a request that runs alone is expected to pay, or a trial is due. Call this once for each
        token.
        """
        if not self._model.can_follow(request):
            return False
        rate, _ = best_count((), self._seconds, ALONE)
        expects = self._depth(1, 0, rate, ALONE) > 0
        self._since_trial += 0.0 if expects else self._seconds(ALONE.known)
        return expects

    def close(self) -> None:
        self._model.close()

    def forget(self, token_ids: Sequence[int], origin: Origin, kept: int) -> None:
        """See `KVMemory.forget`."""
        self._model.forget(token_ids, origin, kept)

    def drop(self, request_id: int) -> None:
        """Stop following a request."""
        self._made.pop(request_id, None)
        self._model.drop(request_id)

    def _observe(self, requests: Sequence[Request]) -> None:
        """Compare the last drafts of requests with the tokens that were sampled."""
        for request in requests:
            known, draft = self._made.pop(request.id, (0, None))
            if draft is None:
                continue
            sampled = request.token_ids(known, request.num_tokens)
            self._acceptance.observe(draft, sampled)
            right = draft.num_right(sampled)
            for offset in range(min(right + 1, len(draft.token_ids), len(sampled))):
                self._chance += WEIGHT * ((offset < right) - self._chance)

    def _depth(self, count: int, behind: int, least_rate: float, room: Room) -> int:
        """Return how many tokens to draft for each of `count` requests.

        The tokens per second must exceed `least_rate`; if they would not, the result is 1 if a trial is due, else 0.
        `behind` is the number of tokens that the draft model must prefill first.
        """
        prefill = self._model.prefill_seconds(behind)
        best, best_rate = 0, least_rate
        expected, chance = float(room.decoding), 1.0
        for depth in range(1, min(MAX_DRAFT, room.most // count) + 1):
            chance *= self._chance
            expected += count * chance
            seconds = self._seconds(room.known + count * depth) + depth * self._model.seconds(count)
            if seconds > room.longest:
                break
            rate = expected / (seconds + prefill / REPLY_TOKENS)
            if rate > best_rate:
                best, best_rate = depth, rate
        # The token of a trial need not be verified: it is compared with the one that is sampled anyway.
        return best or int(self._model.seconds(count) + prefill <= TRIAL_SHARE * self._since_trial)

    def _chunk(self, room: Room) -> int:
        """Return the number of tokens of a prompt to prefill during this step."""
        step, token = self._seconds(room.known), self._model.prefill_seconds(1)
        seconds = min(PREFILL_SHARE * step, room.longest - step)
        tokens = max(BLOCK_SIZE, int(seconds / token)) if token else BLOCK_SIZE
        return min(tokens, self._model.max_step_tokens)

    def _least(self, count: int, rate: float, room: Room) -> float:
        """Return the chance above which a further drafted token pays, at `rate` tokens per second without it."""
        verifying = self._seconds(room.known + count) - self._seconds(room.known)
        return rate * (self._model.seconds(count) + verifying) / count

    def _draft(self, requests: Sequence[Request], depth: int, least: float) -> Mapping[int, Draft]:
        """Draft up to `depth` tokens for each request, while the chance that all of them are right is `least`."""
        self._since_trial = 0.0
        drafts = self._model.draft(requests, depth, lambda draft: min(self._acceptance.reach(draft)) >= least)
        for request in requests:
            if request.id in drafts:
                self._made[request.id] = request.num_tokens, drafts[request.id]
        return drafts
