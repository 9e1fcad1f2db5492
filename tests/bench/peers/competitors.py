"""Find, probe, and start the peers to compare with."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from app.bench.competitor import Competitor, CompetitorFailed
from app.bench.workload import Load
from app.progress import Progress
from tests.bench.peers.ik_llama import IkTools
from tests.bench.peers.llama_build import LlamaBuild, probe
from tests.bench.peers.llama_server import llama_server
from tests.bench.peers.llama_tools import LlamaTools, tools_for
from tests.bench.peers.xllamacpp import PACKAGE, TESTED_VERSION, installed, xllamacpp_engine, xllamacpp_server


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers to compare with, before they are started."""

    xllamacpp: bool
    llama: LlamaBuild | None
    ik: Path | None = None  # the folder of the programs of ik_llama.cpp, which is compared without HTTP only

    def check(self, loads: Sequence[Load]) -> None:
        """Raise CompetitorFailed if the build of llama.cpp lacks a tool that measuring these loads needs."""
        if self.llama is not None:
            for tool in tools_for(loads):
                self.llama.tool(tool)

    def engines(
        self, model: Path, threads: int, loads: Sequence[Load], progress: Progress, resources: ExitStack
    ) -> list[Competitor]:
        """Start the peers' engines, which are measured without HTTP. Raises CompetitorFailed."""
        competitors: list[Competitor] = []
        if self.xllamacpp:
            progress.say(f"Starting {PACKAGE}")
            competitors.append(resources.enter_context(xllamacpp_engine(model, threads, loads)))
        if self.llama is not None:
            competitors.append(LlamaTools(self.llama.description, self.llama.tool, model, threads))
        if self.ik is not None:
            competitors.append(IkTools(self.ik, model, threads))
        return competitors

    def servers(
        self, model: Path, threads: int, loads: Sequence[Load], progress: Progress, resources: ExitStack
    ) -> list[Competitor]:
        """Start the peers' servers. Raises CompetitorFailed."""
        competitors: list[Competitor] = []
        if self.xllamacpp:
            progress.say(f"Starting {PACKAGE}")
            competitors.append(resources.enter_context(xllamacpp_server(model, threads, loads)))
        if self.llama is not None:
            progress.say("Starting llama-server")
            competitors.append(resources.enter_context(llama_server(self.llama, model, threads, loads)))
        return competitors


def find_peers(xllamacpp: bool, llama_server: Path | None, progress: Progress, ik: Path | None = None) -> Peers:
    """Return the peers. Raises CompetitorFailed if there are none, or if `llama_server` is a different program."""
    wanted, xllamacpp = xllamacpp, xllamacpp and installed()
    if wanted and not xllamacpp:
        missing = f"{PACKAGE} is not installed"
        remedy = f"pip install {PACKAGE}=={TESTED_VERSION}, or give a native llama.cpp with --llama-server."
        if llama_server is None:
            raise CompetitorFailed(f"There is no peer to compare with: {missing}", remedy)
        progress.say(f"{missing}: only llama.cpp is compared. To add it: pip install {PACKAGE}=={TESTED_VERSION}")
    return Peers(xllamacpp, None if llama_server is None else probe(llama_server), ik)
