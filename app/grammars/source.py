"""A grammar as a request asks for it."""

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

# Between the parts of JSON there may be nothing, a space, or a line break with its indentation. Without a bound, a
# model that is not sure how to continue writes spaces forever.
WHITESPACE: Final = r"( |\n {0,32})?"
Kind: TypeAlias = Literal["json", "regex", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class GrammarText:
    """`text` is a JSON schema, a regular expression, or a grammar in the library's Lark or in llama.cpp's GBNF."""

    kind: Kind
    text: str
    lenient: bool = False  # keywords of a schema that cannot be enforced are ignored
    whitespace: str | None = WHITESPACE  # between the parts of JSON, as a regular expression; None: nothing

    def packed(self) -> bytes:
        """As the payload of a frame."""
        return json.dumps(asdict(self)).encode()

    def guidance(self) -> dict[str, str | bool]:
        """How JSON is written, in the library's words."""
        if self.whitespace is None:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": self.whitespace}

    @classmethod
    def unpacked(cls, payload: bytes) -> "GrammarText":
        return cls(**json.loads(payload))
