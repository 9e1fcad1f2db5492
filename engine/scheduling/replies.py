"""Replies: the events that a step's tokens mean for their requests, and the ends of requests."""

from engine.counters import Counters
from engine.kv.memory import KVMemory
from engine.request import FinishReason, Request, TokenEvent, TokenLogprobs
from engine.scheduling.beam_groups import BeamGroups
from engine.scheduling.running_set import RunningSet
from engine.step import SampledToken


class Replies:
    """Extends replies by sampled tokens, and ends requests."""

    def __init__(self, requests: RunningSet, groups: BeamGroups, memory: KVMemory, counters: Counters) -> None:
        self._requests = requests
        self._groups = groups
        self._memory = memory
        self._counters = counters

    def extend(self, request: Request, computed: int, found: SampledToken | None) -> list[TokenEvent]:
        """What a step means for one of its requests: a token, or that a part of the prompt was computed."""
        if group := self._requests.group_of(request):
            return self._groups.update(group, request, computed, found)
        prompt = () if found is None else found.prompt_logprobs
        if found is None or (found.token_id is None and not found.problem):
            return [TokenEvent(request.id, None, num_computed=computed, prompt_logprobs=prompt)]
        if found.token_id is None:
            return self.end(request, found.reason, found.problem)
        followed = request.constraint.accept(found.token_id) if request.constraint is not None else ()
        events = [self._token(request, found.token_id, found.logprobs, prompt, last=not followed)]
        for number, token_id in enumerate(followed, 1):
            if events[-1].finish is None:
                events.append(self._token(request, token_id, last=number == len(followed)))
        return events

    def _token(
        self,
        request: Request,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        prompt: tuple[TokenLogprobs, ...] = (),
        *,
        last: bool,
    ) -> TokenEvent:
        """The reply goes on with a token, the `last` of those that its constraint knows of."""
        request.output_ids.append(token_id)
        self._counters.generated_tokens += 1
        finish = self._finish_reason(request, token_id, last=last)
        if finish is not None:
            self._requests.finish(request)
        return TokenEvent(request.id, token_id, logprobs, finish, prompt_logprobs=prompt)

    def _finish_reason(self, request: Request, token_id: int, *, last: bool) -> FinishReason | None:
        params = request.params
        if last and request.constraint is not None and request.constraint.ended:
            return FinishReason.STOP
        if token_id in params.stop_token_ids or (token_id in request.end_ids and not params.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens >= self._memory.room(request) else None

    def end(self, request: Request, finish: FinishReason, error: str = "") -> list[TokenEvent]:
        """End a request in any state, with its whole beam group if it computes a beam of one."""
        if group := self._requests.group_of(request):
            return self._groups.end(group, finish, error)
        self._requests.finish(request)
        return [TokenEvent(request.id, None, finish=finish, error=error)]
