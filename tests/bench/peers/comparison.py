"""Compare Inglenook with peers: its report, the results of each peer, and the ratios between them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from app.bench import table as own_table
from app.bench.benchmark import Plan, own_report, remarks
from app.bench.competitor import Competitor
from app.bench.measured_model import read_model
from app.bench.own_competitor import own_competitor
from app.bench.report import CompetitorResult, Figures, Report, extremes_json, result_of, spread_json
from app.bench.rounds import Rounds, Series
from app.bench.sample import Spread, spread
from app.bench.table import column, spread_text
from app.bench.workload import loads_of
from app.models.sources import pull
from app.progress import Progress
from app.settings.settings import Settings
from tests.bench.peers.bystanders import BystanderWatch
from tests.bench.peers.competitors import Peers
from tests.bench.peers.read_speed import ReadSpeed


@dataclass(frozen=True, slots=True)
class ComparedPeer:
    """The results of one peer."""

    result: CompetitorResult
    ratios: Figures  # Inglenook's rate divided by the peer's in the same round

    def json(self) -> dict[str, Any]:
        result = self.result
        return {
            "peer": result.name,
            "build": result.build,
            "figures": result.json(),
            "busy_elsewhere_cores": spread_json(result.busy_elsewhere),
            "spread": extremes_json(result.figures),
            "ratios": {name: spread_json(ratio) for name, ratio in self.ratios.items()},
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    report: Report
    peers: Sequence[ComparedPeer]
    memory_gb_s: Spread | None = None  # rate at which the threads read memory before each run

    def json(self) -> dict[str, Any]:
        """Return the object of `ingle bench --json` with a list of the peers."""
        memory = None if self.memory_gb_s is None else spread_json(self.memory_gb_s)
        return {**self.report.json(), "memory_gb_s": memory, "compare": [peer.json() for peer in self.peers]}

    def table(self) -> list[tuple[str, ...]]:
        """Return the table of `ingle bench` with two more columns for each peer."""
        lines: list[tuple[str, ...]] = [*own_table.table(self.report)]
        for peer in self.peers:
            cells = {"": peer.result.name, **dict(column(peer.result, self.report))}
            ratios = {row.title: spread_text(peer.ratios[row.name]) for row in self.report.rows}
            over = {"": "ours/theirs", **ratios}
            lines = [(*line, cells.get(line[0], ""), over.get(line[0], "")) for line in lines]
        return lines

    def conditions(self) -> list[str]:
        builds = [f"{peer.result.name}: {peer.result.build}" for peer in self.peers]
        if self.memory_gb_s is None:
            return [*own_table.conditions(self.report), *builds]
        memory = f"The threads read {spread_text(self.memory_gb_s)} GB/s from memory before each run."
        return [*own_table.conditions(self.report), memory, *builds]


def compare(settings: Settings, plan: Plan, peers: Peers, progress: Progress) -> Comparison:
    """Measure Inglenook and its peers in turn, with the same file, threads, and sizes."""
    model, loads = read_model(pull(settings.model, settings, progress)), loads_of(plan.rows)
    if not plan.http:
        peers.check(loads)
    with ExitStack() as resources:
        measured = resources.enter_context(own_competitor(model, settings, loads, progress, http=plan.http))
        start = peers.servers if plan.http else peers.engines
        competitors = [measured.competitor, *start(model.path, measured.threads, loads, progress, resources)]
        memory, rates = ReadSpeed(measured.threads), []

        def watch(one: Competitor) -> BystanderWatch:
            rates.append(memory.measure())
            return BystanderWatch(competitors, one, progress.say)

        rounds = Rounds(model.vocab_size, progress.say, watch)
        series = rounds.run(competitors, loads, plan.repeat)
        for line in remarks(series):
            progress.say(line)
        return replace(comparison_of(own_report(plan, model, measured, series[0]), series), memory_gb_s=spread(rates))


def comparison_of(report: Report, series: Sequence[Series]) -> Comparison:
    """Build the comparison from the series of Inglenook, which is the first, and of the peers.

    Call it while the peers run, because it reads the memory of their processes.
    """
    ours, *theirs = series
    return Comparison(report, [_compared(report, ours, peer) for peer in theirs])


def _compared(report: Report, ours: Series, theirs: Series) -> ComparedPeer:
    over = {row.name: ratios(ours.rates(row.load, row.rate), theirs.rates(row.load, row.rate)) for row in report.rows}
    return ComparedPeer(result_of(theirs, report.rows, report.load), over)


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Spread | None:
    """Divide the rates of each round, because a busy machine slows down both programs of a round."""
    return spread([mine / other if mine and other else None for mine, other in zip(ours, theirs, strict=True)])
