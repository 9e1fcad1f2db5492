"""How one parameter of a call is written between tags: a noun of the formats that do so.

Refuses to know what the values are.
"""

from app.chat.reply_formats.markup import Markup


class ParameterMarkup:
    """How one parameter is written, with holes for its key, its value and, in some formats, its type."""

    def __init__(self, written: str) -> None:
        head, _, close = written.partition("{value}")
        self.head, self.close = Markup(head), Markup(close)
        # One line break on each side belongs to the format; a value may begin and end with more of them.
        self.opens_line = head.endswith("\n")
        self.closes_line = close.startswith("\n")
        if self.opens_line:
            self.head = Markup(head[:-1])
        if self.closes_line:
            self.close = Markup(close[1:])
