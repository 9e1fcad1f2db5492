"""Measure what llama.cpp's own n-gram drafts gain on the workloads of `draft_gain`.

    python -m tests.bench.llama_draft_gain MODEL.gguf --llama-server build/bin/llama-server --rounds 5

Servers with each kind of draft, and one without, run one after the other in each round. A grammar that allows only
one text gives the replies of `edit` and `agent`. The report has the median of the ratios of decode speed.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.bench.child import child
from tests.bench.draft_gain import LENGTH, QUESTION, WORKLOADS
from tests.support.local_servers import answers, free_port

NAMES = ("prose", "again", "edit", "agent")  # `again` repeats the reply of `prose`
SECONDS = 600.0  # time limit of a request

# Options of llama-server. The last three are those that its documentation advises for repeated text.
DRAFTS: Mapping[str, Sequence[str]] = {
    "none": (),
    "ngram-simple": ("--spec-type", "ngram-simple", "--spec-draft-n-max", "64"),
    "ngram-simple, n 4, m 16": (
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16"
    ),
    "ngram-map-k, n 4, m 16": (
        "--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "4", "--spec-ngram-map-k-size-m", "16"
    ),
    "ngram-map-k4v, n 8, m 8": (
        "--spec-type", "ngram-map-k4v", "--spec-ngram-map-k4v-size-n", "8", "--spec-ngram-map-k4v-size-m", "8",
        "--spec-ngram-map-k4v-min-hits", "2", "--spec-draft-n-max", "64",
    ),
    "ngram-mod, n 8, 1 to 16": (
        "--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8", "--spec-ngram-mod-n-min", "1",
        "--spec-ngram-mod-n-max", "16",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """The decode speed of a reply in tokens per second, and its drafted and accepted tokens."""

    speed: float
    drafted: int
    accepted: int


def reply(url: str, name: str) -> Reply:
    """Send the question of a workload to llama-server."""
    workload = WORKLOADS[name]
    body: dict[str, Any] = {"prompt": QUESTION.format(workload.questions[0]), "n_predict": LENGTH, "temperature": 0}
    if workload.reply:
        body |= {"grammar": f"root ::= {json.dumps(workload.reply)}", "n_predict": -1}
    else:
        body |= {"ignore_eos": True, "temperature": workload.params.temperature, "top_p": 0.95, "seed": 1}
    answer = httpx.post(f"{url}/completion", json=body, timeout=SECONDS, trust_env=False).raise_for_status().json()
    timings = answer["timings"]
    return Reply(timings["predicted_per_second"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


def replies(server: Path, model: Path, threads: int, drafts: Sequence[str]) -> Mapping[str, Reply]:
    """Start llama-server, and return the reply of each workload."""
    port = free_port()
    command = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-np", "1", "-c", "2048"]
    command += ["-t", str(threads), "-tb", str(threads), *drafts]
    url = f"http://127.0.0.1:{port}"
    with child("llama-server", command) as process:
        process.wait_for(lambda: answers(url))
        return {name: reply(url, name) for name in NAMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rounds = [
        {kind: replies(given.llama_server, given.model, given.threads, options) for kind, options in DRAFTS.items()}
        for _ in range(given.rounds)
    ]
    for name in NAMES:
        for kind in DRAFTS:
            ratios = sorted(one[kind][name].speed / one["none"][name].speed for one in rounds)
            last = rounds[-1][kind][name]
            print(
                f"{name:8} {kind:24} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}),"
                f" {last.speed:.0f} tok/s, {last.accepted} of {last.drafted} drafted tokens accepted",
                flush=True,
            )


if __name__ == "__main__":
    main()
