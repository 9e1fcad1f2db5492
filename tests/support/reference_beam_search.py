"""A simple beam search that keeps whole sequences in a list and recomputes them in each round.

The engine's beam search must find the same sequences.
"""

from collections.abc import Sequence

from engine.config import GroupConfig
from engine.request import FinishReason
from engine.sampling_params import BeamParams, SamplingParams
from tests.support.hash_model import Seen, most_likely

Found = tuple[float, list[int], FinishReason]  # (score, tokens, finish reason)


def reference_beam_search(
    prompt: Sequence[int],
    beams: BeamParams,
    params: SamplingParams,
    end_ids: frozenset[int],
    max_tokens: int,
    groups: Sequence[GroupConfig] = (GroupConfig(),),
) -> list[Found]:
    """Return the best `beams.width` sequences of the hash model after a prompt, best first."""
    ends = end_ids.union(params.stop_token_ids) if not params.ignore_eos else frozenset(params.stop_token_ids)
    read = Seen(groups).after(*prompt)
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[Found] = []
    for length in range(1, max_tokens + 1):
        candidates = []
        for score, tokens in running:
            ranked = most_likely(0, *read.after(*tokens).slots(), count=beams.width + len(ends))
            candidates += [
                (score + logprob, [*tokens, token_id])
                for token_id, logprob in ranked
                if length > params.min_tokens or token_id not in ends
            ]
        candidates.sort(key=lambda it: it[0], reverse=True)
        for score, tokens in candidates[: beams.width]:
            if tokens[-1] in ends:
                done.append((score / length**beams.length_penalty, tokens, FinishReason.STOP))
            elif length == max_tokens:
                done.append((score / length**beams.length_penalty, tokens, FinishReason.LENGTH))
        done = sorted(done, key=lambda it: it[0], reverse=True)[: beams.width]
        running = [it for it in candidates if it[1][-1] not in ends][: beams.width]
        if len(done) < beams.width:
            continue
        if beams.early_stopping is True:
            break
        longest = max_tokens if beams.early_stopping == "never" and beams.length_penalty > 0 else length
        if running[0][0] / longest**beams.length_penalty <= done[-1][0]:
            break
    return done
