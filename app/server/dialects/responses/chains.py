"""A response that is kept and those that it goes on from: what they say, as items and as messages."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from app.chat.messages import Message
from app.server.dialects.responses.input_items import InputItem, messages_of
from app.server.dialects.responses.stored_responses import StoredResponse
from app.server.dialects.responses.tools import qualified


class _Said(Struct):
    """What is read of a response to go on from it."""

    output: list[InputItem]
    instructions: str | None = None


_items = msgspec.json.Decoder(list[InputItem])
_said = msgspec.json.Decoder(_Said)


def brought(stored: StoredResponse) -> list[InputItem]:
    """The items of its request."""
    return _items.decode(stored.input)


def instructions_of(stored: StoredResponse) -> str | None:
    """Those of its request."""
    return _said.decode(stored.body).instructions


def items_of(chain: Sequence[StoredResponse]) -> list[InputItem]:
    """All of them, oldest first."""
    return [item for one in chain for item in (*brought(one), *_said.decode(one.body).output)]


def conversation_of(chain: Sequence[StoredResponse]) -> tuple[list[Message], list[Message]]:
    """What was said up to the last one, and up to the one before, as the last one's model was told it but for tools."""
    instructions = _said.decode(chain[-1].body).instructions
    whole, before = (messages_of(instructions, items_of(some), (), qualified) for some in (chain, chain[:-1]))
    return whole, before
