"""A drafter that always drafts with its model, so that a few requests test the model much."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.draft import Draft
from engine.drafting.draft_model import DraftModel
from engine.drafting.drafter import Drafter
from engine.drafting.model_drafts import ModelDrafts
from engine.drafting.plan import DraftPlan, Room
from engine.request import Request


class EagerDrafts(ModelDrafts):
    """Drafts for every request that can have drafts, up to eight tokens."""

    def _depth(self, count: int, behind: int, least_rate: float, room: Room) -> int:
        return min(8, room.most // count)

    def _least(self, count: int, rate: float, room: Room) -> float:
        return 0.0


class EagerDrafter(Drafter):
    """Verifies every drafted token."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__(lambda tokens: 1.0)
        self._model = self.eager = EagerDrafts(model, self.acceptance, self._seconds)

    def choose(self, requests: Sequence[Request], room: Room) -> Mapping[int, Draft]:
        super().choose(requests, replace(room, most=0))
        return {} if room.prefills or self._model is None else self.eager.choose(requests, DraftPlan({}, 0.0), room)
