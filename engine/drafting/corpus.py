"""Corpus: recent replies, from which drafts for later replies are taken.

Each cache salt has its own corpus: a draft that is accepted makes a reply faster, and would otherwise tell one client
what another has received.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.drafting.token_index import END, Match, TokenIndex

# Maximum number of tokens of a corpus, in two halves. The older half is dropped when the newer one is full. A token
# takes about 200 bytes.
CAPACITY = 1 << 17
MAX_SALTS = 8  # number of corpora; the one that was extended longest ago is dropped
LEAD = 16  # prompt tokens kept before a reply, so that the start of a reply can match


class Corpus:
    """Replies of requests with the same cache salt."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._half = capacity // 2
        self._newer, self._older = TokenIndex(), TokenIndex()

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, token_ids: Sequence[int]) -> None:
        """Append a text. Only the last half of the capacity is kept of a longer one."""
        if len(self._newer) + len(token_ids) >= self._half:
            self._newer, self._older = TokenIndex(), self._newer
        self._newer.extend(token_ids[-self._half :])
        self._newer.extend((END,))

    def find(self, suffix: Sequence[int], count: int) -> tuple[int, tuple[int, ...]]:
        """Return the length of the longest match of `suffix`, and at most `count` tokens after it; (0, ()) if none."""
        best: tuple[Match, TokenIndex] | None = None
        for index in (self._newer, self._older):
            match = index.match(suffix)
            if match is not None and (best is None or match.length > best[0].length):
                best = match, index
        if best is None:
            return 0, ()
        return best[0].length, best[1].tokens_after(best[0], count, repeats=False)


class Corpora:
    """The corpora of all cache salts."""

    def __init__(self) -> None:
        self._by_salt: OrderedDict[str, Corpus] = OrderedDict()

    def of(self, salt: str) -> Corpus | None:
        return self._by_salt.get(salt)

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Append a text to the corpus of a cache salt."""
        self._by_salt.setdefault(salt, Corpus()).add(token_ids)
        self._by_salt.move_to_end(salt)
        while len(self._by_salt) > MAX_SALTS:
            self._by_salt.popitem(last=False)

    def forget(self, salt: str) -> None:
        """Drop the corpus of a cache salt."""
        self._by_salt.pop(salt, None)
