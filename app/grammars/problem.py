"""Why a grammar is refused: the error that everything in a grammar process raises."""

SIMPLIFY = "Use smaller counts, fewer alternatives, or fewer nested repetitions."


class GrammarProblem(Exception):
    """A grammar or schema that cannot be compiled, enforced or completed.

    `place` is the path of the part at fault, from the root of the schema.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
