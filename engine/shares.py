"""How the tokens of a step are divided among those that want some: nobody waits for all of another's prompt.

Whoever wants no more than its share gets that, and the others divide what is left, in proportion to the weights of
their classes. So a person's short question is read at once beside a program's long prompt, and that goes on meanwhile.
Refuses to know blocks and seats. No torch.
"""

from collections.abc import Mapping, Sequence

from engine.request import Request, ServiceClass

WEIGHTS = {ServiceClass.INTERACTIVE: 16, ServiceClass.NORMAL: 4, ServiceClass.BACKGROUND: 1}


def shares(wanted: Sequence[tuple[Request, int]], budget: int) -> Mapping[int, int]:
    """Tokens of each request by its id: together at most `budget`, and all of it where so much is wanted.

    Weighted max-min fairness (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2); first come, first served
    for what does not divide evenly.
    """
    given: dict[int, int] = {}
    weight = sum(WEIGHTS[request.origin.service] for request, _ in wanted)
    for request, tokens in sorted(wanted, key=lambda it: it[1] / WEIGHTS[it[0].origin.service]):
        own = WEIGHTS[request.origin.service]
        given[request.id] = min(tokens, -(-budget * own // weight))
        budget -= given[request.id]
        weight -= own
    return given
