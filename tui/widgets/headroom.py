"""Headroom: empty lines below text that grows, laid out before the text that fills them.

A layout costs as much as drawing all that is seen, and text that comes fast would want several in a second. Knows any
widget whose height follows from what it shows.
"""

from textual.widget import Widget

LINES = 5


def grown(widget: Widget) -> None:
    """It shows more than before: draw that where it fits, and lay it out with headroom where it does not."""
    widget.clear_cached_dimensions()
    size, screen = widget.content_size, widget.app.size
    needed = widget.get_content_height(screen, screen, size.width)
    wide = widget.get_content_width(screen, screen) if widget.styles.is_auto_width else 0
    if not size or wide > size.width:
        widget.refresh(layout=True)
    elif needed > size.height:
        widget.styles.min_height = needed + widget.gutter.height + LINES
    widget.refresh()


def opened(block: Widget) -> None:
    """It is new, and will grow: what shows its end is laid out with headroom at once."""
    inner = list(block.query())
    shown = inner[-1] if inner else block
    shown.styles.min_height = shown.gutter.height + LINES


def settled(widget: Widget) -> None:
    """It, and what is in it, grows no more."""
    for one in (widget, *widget.query()):
        if one.styles.inline.min_height is not None:
            one.clear_cached_dimensions()
            one.styles.min_height = None
