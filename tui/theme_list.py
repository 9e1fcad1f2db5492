"""The list of themes: those of this program first, and the theme in use marked."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from tui import themes


def ordered(names: Iterable[str]) -> Sequence[str]:
    """Return the names of themes, with those of this program first."""
    own = [theme.name for theme in themes.OWN]
    return sorted(names, key=lambda name: (own.index(name) if name in own else len(own), name))


def find_theme(typed: str, names: Iterable[str]) -> str | None:
    """Return the theme that the user means: the one of that name, or the only one of this program that contains it."""
    known, own = set(names), {theme.name for theme in themes.OWN}
    if typed in known:
        return typed
    similar = [name for name in own & known if typed and typed.lower() in name]
    return similar[0] if len(similar) == 1 else None


class ThemeList(Provider):
    """Lists the themes in the command palette."""

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each theme, and a mark for the one in use."""
        for name in ordered(self.app.available_themes):
            yield name, "  in use" if name == self.app.theme else ""

    async def discover(self) -> Hits:
        for name, mark in self._rows():
            display = Content.assemble(name, (mark, "italic"))
            yield DiscoveryHit(display, partial(setattr, self.app, "theme", name), text=name)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, mark in self._rows():
            if (match := matcher.match(name)) > 0:
                display = Content.assemble(matcher.highlight(name), (mark, "italic"))
                yield Hit(match, display, partial(setattr, self.app, "theme", name), text=name)
