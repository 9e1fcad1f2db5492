"""Random texts of settings files, as people and programs write them: comments, line ends, orders, and odd keys."""

import json
import random
from collections.abc import Sequence

KEYS = ("env", "model", "models", "a b", "x.y", "ANTHROPIC_MODEL", "provider", "ключ", "theme", "Env", "model ")

YAML_KEYS = ("model", "name", "theme", "notes", "models", "Model", "openai-api-base")


def json_text(seed: int) -> str:
    """Return a JSON file with comments. Its root is an object, or a list if the seed is a multiple of 5."""
    chance = random.Random(seed)
    style = _Style(chance)
    root = style.json_list(0) if seed % 5 == 0 else style.json_object(0)
    return style.finished(f"{style.comment(0)}{root}{style.end_comment()}")


def yaml_text(seed: int) -> str:
    """Return a YAML file with comments. Its root is a mapping, or a list if the seed is a multiple of 5."""
    chance = random.Random(seed)
    style = _Style(chance)
    start = chance.choice(["", "", "---\n", "# first\n---\n"])
    if seed % 5 == 0:
        return style.finished(start + style.yaml_list(0))
    names = chance.sample(
        ["model", "name", "theme", "notes", "models", "Model", "openai-api-base"], chance.randrange(6)
    )
    return style.finished(start + "".join(style.yaml_member(name) for name in names))


class _Style:
    """How one author writes."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._unit = chance.choice(["  ", "    ", "\t"])
        self._comments = 0
        self._is_flat = chance.random() < 0.15
        self._trails = chance.random() < 0.3
        self._notes = chance.random() < 0.6

    def finished(self, text: str) -> str:
        """Add a byte order mark, the line ends, and the end of the file."""
        text = text if self._chance.random() < 0.7 else text.rstrip("\n")
        text = text.replace("\n", "\r\n") if self._chance.random() < 0.3 else text
        return f"\ufeff{text}" if self._chance.random() < 0.15 else text

    def comment(self, level: int) -> str:
        """Return lines before a value."""
        if not self._notes or self._is_flat or self._chance.random() < 0.6:
            return ""
        self._comments += 1
        text = self._chance.choice(["// note {}", "/* note {} */", "/* note {}\n two */", '// {{ "note": {} }},'])
        return f"{text.format(self._comments)}\n{self._unit * level}"

    def end_comment(self) -> str:
        """Return what follows a value in its line."""
        if not self._notes or self._is_flat or self._chance.random() < 0.7:
            return "\n" if not self._is_flat else ""
        self._comments += 1
        return self._chance.choice([" // end {}\n", "  \n", " /* end {} */\n", " // end {}  \n"]).format(self._comments)

    def json_object(self, level: int) -> str:
        names = [self._chance.choice(KEYS) for _ in range(self._chance.randrange(5))]
        members = [f"{json.dumps(name, ensure_ascii=False)}:{self._gap}{self.json_value(level + 1)}" for name in names]
        return self._bracketed("{", members, "}", level)

    def json_list(self, level: int) -> str:
        return self._bracketed("[", [self.json_value(level + 1) for _ in range(self._chance.randrange(4))], "]", level)

    def json_value(self, level: int) -> str:
        kind = self._chance.randrange(9)
        if kind < 2 and level < 4:
            return self.json_object(level)
        if kind == 2 and level < 4:
            return self.json_list(level)
        return self._chance.choice(["1", "-2.50e+3", "true", "null", '"text // no comment"', '"\\u00e9\\"}"', '""'])

    @property
    def _gap(self) -> str:
        return self._chance.choice([" ", "", "  "])

    def _bracketed(self, opening: str, entries: Sequence[str], closing: str, level: int) -> str:
        if not entries:
            return opening + self._chance.choice(["", " ", f"\n{self._unit * level}"]) + closing
        if self._is_flat or self._chance.random() < 0.15:
            return opening + ", ".join(entries) + ("," if self._trails else "") + closing
        lines, indentation = "\n", self._unit * (level + 1)
        for number, entry in enumerate(entries):
            comma = "," if number < len(entries) - 1 or self._trails else ""
            lines += f"{indentation}{self.comment(level + 1)}{entry}{comma}{self.end_comment() or chr(10)}"
        return f"{opening}{lines}{self._unit * level}{closing}"

    def yaml_member(self, name: str) -> str:
        lines = f"# about {name}\n" if self._notes and self._chance.random() < 0.4 else ""
        if name == "models":
            return lines + self._chance.choice(
                [
                    "models: []\n",
                    "models:  # none yet\n",
                    f"models:\n{self.yaml_list(0)}",
                    f"models:\n{self.yaml_list(2)}",
                ]
            )
        if name == "notes":
            return lines + "notes: |\n  first # no comment\n\n  models:\n    - second\n"
        text = self._chance.choice(["gpt-4o", "'it''s'", '"two # three"', "12", "", "true"])
        note = " # note" if self._notes and self._chance.random() < 0.4 else ""
        return f"{lines}{name}: {text}{note}\n"

    def yaml_list(self, indentation: int) -> str:
        lines = ""
        for number in range(self._chance.randrange(1, 4)):
            blanks = " " * indentation
            lines += f"{blanks}# item {number}\n" if self._notes else ""
            lines += f"{blanks}- name: item {number}\n{blanks}  roles: [chat, edit]\n"
            lines += f"{blanks}  # after\n\n" if self._notes else ""
        return lines
