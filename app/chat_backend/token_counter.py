"""Counts the tokens of a chat's prompts. Estimates are corrected by what the server reported for an earlier reply."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from app.chat_backend.prompt_messages import prompt_messages
from app.history.records import Chat, StoredMessage

if TYPE_CHECKING:
    from app.chat_backend.engine.server import ReadyEngine

# A report below this share of the estimate is ignored: some servers count only the tokens that were not cached.
_PLAUSIBLE = 0.5


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of texts and messages for one chat."""

    engine: "ReadyEngine"
    scale: float = 1.0  # reported tokens for each estimated one

    async def text(self, text: str) -> int:
        return self._scaled(await self.engine.endpoint.count(self.engine.model, text=text))

    async def messages(self, messages: Sequence[Mapping[str, object]]) -> int:
        return self._scaled(await self.engine.endpoint.count(self.engine.model, messages=messages))

    def _scaled(self, count: int) -> int:
        return count if self.scale == 1 else math.ceil(count * self.scale)


async def token_counter(engine: "ReadyEngine", chat: Chat, branch: Sequence[StoredMessage]) -> TokenCounter:
    """Return a counter for a branch of a chat. The last reply whose usage is known determines its scale."""
    last = next((index for index in range(len(branch), 0, -1) if _reported_tokens(branch[index - 1])), 0)
    if engine.endpoint.is_inglenook or not last:
        return TokenCounter(engine)
    reply = branch[last - 1]
    then = replace(chat, trim=chat.trim.first(reply.usage.num_left_out if reply.usage else 0))
    counted = prompt_messages(then, branch[:last], with_reasoning=False)
    estimate = await engine.endpoint.count(engine.model, messages=[*counted, {"content": reply.reasoning}])
    scale = _reported_tokens(reply) / max(1, estimate)
    return TokenCounter(engine, scale if scale > _PLAUSIBLE else 1.0)


def _reported_tokens(message: StoredMessage) -> int:
    """Return the tokens of a reply and its prompt; 0 if the server did not report them."""
    return message.usage.total_tokens if message.usage else 0
