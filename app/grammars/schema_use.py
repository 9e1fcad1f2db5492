"""How a part of a schema is used: alone, or together with others that hold for the same value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from app.grammars.schema_keywords import Json


@dataclass(frozen=True, slots=True)
class Use:
    """`shared` are the members that other parts of the same intersection describe too; `shares_items`, the items."""

    is_closed: bool  # objects allow no members but those that are described
    shared: frozenset[str] = frozenset()
    shares_items: bool = False

    def of_member(self, name: str) -> "Use":
        """Of the value of a member."""
        return PART if name in self.shared else VALUE

    @property
    def of_items(self) -> "Use":
        return PART if self.shares_items else VALUE

    @property
    def of_others(self) -> "Use":
        """Of the values of members that are not named."""
        return VALUE if self.is_closed else PART


VALUE: Final = Use(is_closed=True)  # the whole description of a value
PART: Final = Use(is_closed=False)

Rewrite: TypeAlias = Callable[[Json, str, Use], Json]  # a schema at its place
Refuse: TypeAlias = Callable[[str, str], None]  # a message and the place at fault; raises, or returns
