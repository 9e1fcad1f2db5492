"""A screen that can skip frames. Overrides a private method of Textual (see tui/widgets/textual_internals.py)."""

from textual.screen import Screen


class SteadyScreen(Screen[None]):
    """Skips drawing while `is_unsettled`: content that moves right after the layout would flicker."""

    @property
    def is_unsettled(self) -> bool:
        return False

    def _compositor_refresh(self) -> None:
        if not self.is_unsettled:
            super()._compositor_refresh()
