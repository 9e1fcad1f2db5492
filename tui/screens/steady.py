"""A screen that skips frames, on a private method of Textual: see tui/widgets/textual_internals.py for the others."""

from textual.screen import Screen


class SteadyScreen(Screen[None]):
    """A screen that skips frames while `is_unsettled`: a layout whose contents move right after it would flash."""

    @property
    def is_unsettled(self) -> bool:
        return False

    def _compositor_refresh(self) -> None:
        if not self.is_unsettled:
            super()._compositor_refresh()
