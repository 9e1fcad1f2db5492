"""A client for tests: keeps chats in memory, and plays replies from scripts.

At each WAIT in a script, the reply waits until the test sets `gate`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.request import TokenSources
from tui.branches import Branches
from tui.client import ClientError, NotLoaded
from tui.engine_types import (
    Amount,
    Download,
    EngineRequest,
    EngineStatus,
    Fit,
    Loading,
    ModelInfo,
    ModelMemory,
    Phase,
    Recommendation,
    RequestId,
    SearchResults,
)
from tui.types import (
    Attachment,
    CallId,
    Chat,
    ChatId,
    ChatSettings,
    ChatSummary,
    ContextBudget,
    ExportFormat,
    Finish,
    FullContext,
    Message,
    MessageId,
    Notice,
    Permission,
    Preset,
    ReasoningDelta,
    ReplyEnd,
    ReplyEvent,
    ReplyStarted,
    Role,
    Sampling,
    SearchHit,
    Summary,
    TextDelta,
    ToolServer,
    TrimPlan,
    Usage,
)

USAGE = Usage(TokenSources(1188, 0, 16, 31), 212, 0.002, 0.41, 4.69)
NOON = 1_767_268_800.0
RECOMMENDED = Sampling(temperature=0.7, top_p=0.95)
WAIT = None  # in a script: wait until `gate` is set

Script = Sequence[ReplyEvent | ClientError | None]


class ChatsByName(dict[ChatId, Chat]):
    def __missing__(self, chat: ChatId) -> Chat:
        raise ClientError(f"There is no chat {chat}.", "Open another one.")


@dataclass
class ScriptedChats:
    """Stores chats in memory."""

    chats: ChatsByName = field(default_factory=ChatsByName)
    deleted: dict[ChatId, Chat] = field(default_factory=dict)
    kept_presets: dict[str, Preset] = field(default_factory=dict)
    drafts: dict[ChatId | None, str] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    exported: list[tuple[ChatId, Path, ExportFormat]] = field(default_factory=list)
    backups: list[Path] = field(default_factory=list)
    titled: list[ChatId] = field(default_factory=list)  # chats whose titles were requested
    untitled: ClientError | None = None  # error that a request for a title raises
    pending_notices: list[Notice] = field(default_factory=list)  # notices that `notices` yields
    number: int = 0

    def name(self) -> str:
        self.number += 1
        return str(self.number)

    def put(self, chat: ChatId, message: Message) -> Message:
        """Add a message as the leaf, or replace the message with the same id."""
        there = self.chats[chat]
        others = tuple(one for one in there.messages if one.id != message.id)
        if len(others) == len(there.messages):
            others = (*others, message)
        else:
            others = tuple(message if one.id == message.id else one for one in there.messages)
        summary = replace(there.summary, message_count=len(others))
        self.chats[chat] = replace(there, messages=others, leaf=message.id, summary=summary)
        return message

    async def summaries(self, *, archived: bool = False) -> Sequence[ChatSummary]:
        found = [self._shown(chat) for chat in self.chats.values() if chat.summary.archived is archived]
        found = [one for one in found if one.message_count or one.title or one.pinned]
        return sorted(found, key=lambda one: (not one.pinned, -one.updated))

    def _shown(self, chat: Chat) -> ChatSummary:
        """Return the summary of a chat for lists. The title of a draft is its text."""
        draft = self.drafts.get(chat.summary.id, "")
        title = chat.summary.title or (" ".join(draft.split()) or "New chat") * bool(draft)
        return replace(chat.summary, title=title)

    async def create(self, settings: ChatSettings, *, private: bool = False) -> Chat:
        name = ChatId(f"chat-{self.name()}")
        summary = ChatSummary(name, "", NOON + self.number, 0, private=private)
        self.chats[name] = Chat(summary, settings, (), None)
        return self.chats[name]

    async def open(self, chat: ChatId) -> Chat:
        return replace(self.chats[chat], draft=self.drafts.get(chat, ""))

    async def add(
        self, chat: ChatId, parent: MessageId | None, text: str, attachments: Sequence[Attachment] = ()
    ) -> Message:
        if not self.chats[chat].summary.private:
            self.sent.insert(0, text)
        self.drafts.pop(chat, None)
        name = MessageId(f"message-{self.name()}")
        return self.put(chat, Message(name, parent, Role.USER, text, NOON, tuple(attachments)))

    async def rewrite(self, chat: ChatId, reply: MessageId, text: str) -> Message:
        old = next(one for one in self.chats[chat].messages if one.id == reply)
        return self.put(
            chat, replace(old, id=MessageId(f"message-{self.name()}"), text=text, usage=None, finish=Finish.EDITED)
        )

    async def show_branch(self, chat: ChatId, leaf: MessageId) -> None:
        self.chats[chat] = replace(self.chats[chat], leaf=leaf)

    async def configure(self, chat: ChatId, settings: ChatSettings) -> None:
        self.chats[chat] = replace(self.chats[chat], settings=settings)

    async def title(self, chat: ChatId) -> str:
        self.titled.append(chat)
        if self.untitled is not None:
            raise self.untitled
        if not self.chats[chat].summary.title:
            await self.rename(chat, "A title of the client")
        return self.chats[chat].summary.title

    def _summarize(self, chat: ChatId, summary: ChatSummary) -> None:
        self.chats[chat] = replace(self.chats[chat], summary=summary)

    async def rename(self, chat: ChatId, title: str) -> None:
        self._summarize(chat, replace(self.chats[chat].summary, title=title))

    async def pin(self, chat: ChatId, pinned: bool) -> None:
        self._summarize(chat, replace(self.chats[chat].summary, pinned=pinned))

    async def archive(self, chat: ChatId, archived: bool) -> None:
        self._summarize(chat, replace(self.chats[chat].summary, archived=archived))

    async def delete(self, chat: ChatId) -> None:
        self.deleted[chat] = self.chats.pop(chat)

    async def undelete(self, chat: ChatId) -> None:
        self.chats[chat] = self.deleted.pop(chat)

    async def notices(self) -> AsyncGenerator[Notice, None]:
        for notice in self.pending_notices:
            yield notice

    async def search(self, text: str) -> Sequence[SearchHit]:
        hits = []
        for chat in self.chats.values():
            for message in chat.messages:
                place = message.text.lower().find(text.lower())
                if place >= 0:
                    end = place + len(text)
                    before, after = message.text[max(0, place - 30) : place], message.text[end : end + 30]
                    hits.append(
                        SearchHit(chat.summary, message.id, message.role, before, message.text[place:end], after)
                    )
        return hits

    async def draft(self) -> str:
        return self.drafts.get(None, "")

    async def save_draft(self, chat: ChatId | None, text: str) -> None:
        self.drafts[chat] = text

    async def inputs(self) -> Sequence[str]:
        return self.sent

    async def presets(self) -> Sequence[Preset]:
        return list(self.kept_presets.values())

    async def save_preset(self, preset: Preset) -> None:
        self.kept_presets[preset.name] = preset

    async def delete_preset(self, name: str) -> None:
        del self.kept_presets[name]

    async def export(self, chat: ChatId, path: Path, form: ExportFormat) -> None:
        self.exported.append((chat, path, form))

    async def export_all(self, path: Path) -> int:
        self.backups.append(path)
        return len(self.chats)

    async def import_chats(self, path: Path) -> Sequence[ChatSummary]:
        raise ClientError(f"{path} is no file of chats.", "Export one as JSON.")


@dataclass
class ScriptedReplies:
    """Plays the next script for each reply; the last script is repeated."""

    chats: ScriptedChats
    scripts: list[Script] = field(default_factory=lambda: [[TextDelta("Hello."), ReplyEnd(Finish.COMPLETE, USAGE)]])
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[ChatId, MessageId]] = field(default_factory=list)
    stopped: list[MessageId] = field(default_factory=list)
    closed: int = 0  # number of streams that were closed early
    deaf: bool = False  # whether `stop` has no effect
    counts: asyncio.Event | None = None  # token counts wait until it is set; None: they do not wait
    token_length: int = 4  # characters in a token
    is_estimating: bool = False  # whether token counts are estimates

    async def reply(self, chat: ChatId, to: MessageId) -> AsyncGenerator[ReplyEvent, None]:
        self.asked.append((chat, to))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        message = Message(MessageId(f"message-{self.chats.name()}"), to, Role.ASSISTANT, "", NOON, model="smollm2:135m")
        begun = False
        try:
            for written in script:
                if written is WAIT:
                    await self._wait(message.id)
                if isinstance(written, ClientError):
                    raise written
                step = ReplyEnd(Finish.STOPPED, USAGE) if message.id in self.stopped else written
                if isinstance(step, TextDelta | ReasoningDelta | ReplyEnd) and not begun:
                    begun = True
                    yield ReplyStarted(self.chats.put(chat, message).id, HERE.name)
                if isinstance(step, TextDelta):
                    message = self.chats.put(chat, replace(message, text=message.text + step.text))
                if isinstance(step, ReplyEnd):
                    self.chats.put(chat, replace(message, finish=step.finish, usage=step.usage))
                if step is not WAIT:
                    yield step
                if isinstance(step, ReplyEnd):
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.closed += 1
            raise

    async def _wait(self, message: MessageId) -> None:
        while not self.gate.is_set() and (message not in self.stopped or self.deaf):
            await asyncio.sleep(0.005)
        self.gate.clear()

    async def stop(self, message: MessageId) -> None:
        self.stopped.append(message)

    async def count_tokens(self, text: str) -> int:
        if self.counts is not None:
            await self.counts.wait()
        return len(text) // self.token_length

    def estimates_counts(self) -> bool:
        return self.is_estimating


@dataclass
class ScriptedContext:
    """A context with a length limit. A token is four characters."""

    chats: ScriptedChats
    limit: int | None = 8192  # None: unknown
    summary_tokens: int = 0  # length of each summary in tokens
    measures: bool = True  # whether budgets are returned; otherwise they wait, as without a loaded model
    summarizes: asyncio.Event = field(default_factory=asyncio.Event)  # set: summaries are written; cleared: they wait

    async def budget(self, chat: ChatId | None, leaf: MessageId | None, typed: str) -> ContextBudget:
        while not self.measures:
            await asyncio.sleep(0.005)
        there = self.chats.chats.get(chat) if chat is not None else None
        system = len(there.settings.system) // 4 if there else 0
        branch = Branches(there.messages).path(leaf) if there else []
        sent = [one for one in branch if there and one.id not in there.left_out]
        return ContextBudget(self.limit, system, (sum(len(one.text) for one in sent) + len(typed)) // 4, 1024)

    async def plan(self, chat: ChatId, leaf: MessageId | None, how: FullContext, typed: str) -> TrimPlan:
        told_of = [one for one in self.chats.chats[chat].messages if one.id not in self.chats.chats[chat].left_out]
        old = told_of[:2] if leaf is not None else []
        cost = self.summary_tokens if how is FullContext.SUMMARIZE else 0
        return TrimPlan(how, tuple(one.id for one in old), sum(len(one.text) for one in old) // 4 - cost)

    async def trim(self, chat: ChatId, plan: TrimPlan) -> Chat:
        there = self.chats.chats[chat]
        summaries = there.summaries
        if plan.how is FullContext.SUMMARIZE:
            await self.summarizes.wait()
            summaries = (*summaries, Summary(plan.messages[-1], "They greeted [each] other."))
        self.chats.chats[chat] = replace(there, left_out=there.left_out | set(plan.messages), summaries=summaries)
        return self.chats.chats[chat]


@dataclass
class ScriptedEngine:
    """An engine that reports two requests from other clients and one from this chat."""

    steps: Sequence[Loading] = (Loading("smollm2:135m", "reading the weights", 0.5),)
    loads: asyncio.Event = field(default_factory=asyncio.Event)  # set: the model is loaded; cleared: loading waits
    problem: ClientError | None = None  # error that loading raises
    tried: int = 0  # number of retries
    followed: int = 0  # number of calls of `loading`
    aborted: list[RequestId] = field(default_factory=list)
    requests: tuple[EngineRequest, ...] = (
        EngineRequest(RequestId("1"), "Inglenook", "interactive", Phase.WRITING, 1235, 1235, 212, 4.7, mine=True),
        EngineRequest(RequestId("2"), "Zed", "normal", Phase.READING, 2048, 9000, 0, 1.25),
        EngineRequest(RequestId("3"), "", "background", Phase.WAITING, 0, 512, 0, 0.05),
    )
    looks: int = 0
    is_reported: bool = True  # whether the status has details
    sampling: Sampling = RECOMMENDED
    runs_elsewhere: bool = False  # whether another program has started an engine
    loaded: asyncio.Queue[Loading] = field(default_factory=asyncio.Queue)  # what `loaded_models` yields

    def address(self) -> str:
        return "http://127.0.0.1:4645/v1" if self.loads.is_set() else ""

    def default_sampling(self) -> Sampling | None:
        return self.sampling if self.loads.is_set() else None

    async def loading(self, *, retry: bool = False) -> AsyncGenerator[Loading, None]:
        self.tried += retry
        self.followed += 1
        for step in self.steps:
            yield step
        await self.loads.wait()
        if self.problem is not None:
            raise self.problem
        yield Loading("smollm2:135m", "loaded", loaded=True)

    async def is_ready(self) -> bool:
        return self.loads.is_set() and self.problem is None

    async def is_started_elsewhere(self) -> bool:
        return self.runs_elsewhere

    async def loaded_models(self) -> AsyncGenerator[Loading, None]:
        while True:
            yield await self.loaded.get()

    async def status(self) -> EngineStatus:
        await self.loads.wait()
        if self.problem is not None:
            raise NotLoaded(self.problem.message, self.problem.remedy)
        self.looks += 1
        if not self.is_reported:
            return EngineStatus("smollm2:135m", (), (), (), 0, 0, is_reported=False)
        tiers = (
            Amount("device", 600_000_000, 1_000_000_000),
            Amount("RAM", 0, 0),
            Amount("disk", 3_000_000, 8_000_000),
        )
        memory = (Amount("process", 900_000_000, 0), Amount("GPU", 6_100_000_000, 24_000_000_000))
        left = tuple(request for request in self.requests if request.id not in self.aborted)
        models = (
            ModelMemory("smollm2:135m", "loaded", 96_600_000, 30_000_000, 400_000_000),
            ModelMemory("qwen3:4b", "loading 43 %"),
        )
        return EngineStatus("smollm2:135m", left, tiers, memory, 1234, 5678, models, 12_100_000_000)

    async def abort(self, request: RequestId) -> None:
        self.aborted.append(request)


HERE = ModelInfo("smollm2:135m", "Q8_0", 144_811_456, "apache-2.0", installed=True, loaded=True, speed=80.0)
KNOWN = ModelInfo("qwen3:4b", "Q4_K_M", 2_497_281_120, "apache-2.0", True, is_estimate=True, speed=4.64)
LARGE = ModelInfo("llama3.3:70b", "Q4_K_M", 42_520_395_584, "llama3.3", False)
REPOSITORY = ModelInfo("someone/Model-GGUF", license="mit", is_repository=True)
FITS = {
    HERE.name: Fit("In use · 8,192-token context", True),
    KNOWN.name: Fit("fits: 24k context; needs 4.1 GB, 16 GB free", True),
    LARGE.name: Fit("does not fit: needs 44 GB, 16 GB free", False),
}


@dataclass
class ScriptedModels:
    """Lists one installed model, two models in the catalog, and one repository with one variant."""

    pulled: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    others: tuple[ModelInfo, ...] = ()  # additional installed models
    fetching: bool = False  # whether the engine is downloading the known model
    loaded: list[str] = field(default_factory=list)
    waits: bool = True  # whether a load waits for running replies
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # set: downloads finish; cleared: they wait
    offered: tuple[ModelInfo, ...] = ()  # models of a remote endpoint, which replace the installed ones
    remote: str = ""  # address of the remote endpoint
    unreachable: ClientError | None = None  # error that the list of installed models raises
    better: Recommendation | None = None  # the model to recommend
    finds: asyncio.Event = field(default_factory=asyncio.Event)  # set: searches finish; cleared: they wait
    offline: bool = False  # whether searches only find models of the catalog
    reason: str = ""  # reason why no model can be downloaded
    free: int | None = 24_500_000_000  # free bytes of the disk
    looked_at: list[str] = field(default_factory=list)  # models whose fit was checked
    looks_end: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.looks_end.set()

    async def installed(self) -> Sequence[ModelInfo]:
        if self.unreachable is not None:
            raise self.unreachable
        here = () if self.remote else (HERE, *self.others)
        return [model for model in self.offered or here if model.name not in self.deleted]

    async def catalog(self) -> Sequence[ModelInfo]:
        if self.remote:
            return []
        known = replace(KNOWN, installed=KNOWN.name in self.arrived, fetching=self.fetching)
        return [HERE, known, LARGE]

    async def recommended(self) -> Recommendation | None:
        return self.better

    def offline_reason(self) -> str:
        return self.reason

    def endpoint(self) -> str:
        return self.remote

    async def fit(self, name: str) -> Fit:
        await self.looks_end.wait()
        self.looked_at.append(name)
        if name not in FITS:
            raise ClientError("the Hub cannot be reached")
        return FITS[name]

    async def search(self, text: str) -> SearchResults:
        await self.finds.wait()
        if self.offline:
            return SearchResults((KNOWN,), "the Hub cannot be reached: these are models with a short name")
        return SearchResults((REPOSITORY,) if text in REPOSITORY.name.lower() else ())

    async def waits_for_replies(self, name: str) -> bool:
        return self.waits

    async def find(self, name: str) -> ModelInfo:
        listed = [*await self.installed(), *await self.catalog()]
        return next((model for model in listed if model.name == name), ModelInfo(name))

    async def free_disk(self) -> int | None:
        return self.free

    async def variants(self, name: str) -> Sequence[ModelInfo]:
        return [ModelInfo(f"{name}:Q4_K_M", "Q4_K_M", 1_000_000_000, "mit", True)]

    async def pull(self, name: str) -> AsyncGenerator[Download, None]:
        self.pulled.append(name)
        yield Download(420_000_000, 1_000_000_000, 12_300_000)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.paused.append(name)
            self.fetching = False
            raise
        self.arrived.append(name)

    async def delete(self, name: str) -> None:
        self.deleted.append(name)

    async def load(self, name: str) -> AsyncGenerator[Loading, None]:
        yield Loading(name, "reading the weights")
        if name == LARGE.name:
            yield Loading(HERE.name, "loaded", loaded=True)
            raise ClientError(f"{name} does not fit.", f"{HERE.name} is loaded again.")
        self.loaded.append(name)
        yield Loading(name, "loaded", loaded=True)


@dataclass
class ScriptedTools:
    """Tool servers with fixed tools. Records the answers, and the tools whose permission was revoked."""

    listed: list[ToolServer] = field(default_factory=list)
    answers: list[tuple[CallId, Permission]] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)

    def config_paths(self) -> Sequence[Path]:
        return [Path("/home/me/.config/inglenook/mcp.json")]

    async def servers(self) -> Sequence[ToolServer]:
        return self.listed

    async def restart(self, server: str) -> None:
        self.restarted.append(server)

    def answer(self, call: CallId, permission: Permission) -> None:
        self.answers.append((call, permission))

    async def revoke(self, tool: str) -> None:
        self.revoked.append(tool)


@dataclass
class ScriptedPreferences:
    """Records the saved theme."""

    themes: list[str] = field(default_factory=list)

    async def save_theme(self, name: str) -> None:
        self.themes.append(name)


class ScriptedClient:
    """A client that consists of the scripted parts above."""

    def __init__(self, *scripts: Script) -> None:
        self.chats = ScriptedChats()
        self.replies = ScriptedReplies(self.chats)
        if scripts:
            self.replies.scripts = list(scripts)
        self.context = ScriptedContext(self.chats)
        self.engine = ScriptedEngine()
        self.models = ScriptedModels()
        self.models.finds.set()
        self.preferences = ScriptedPreferences()
        self.tools = ScriptedTools()

    def keep(self, title: str, *texts: str, pinned: bool = False) -> ChatId:
        """Create a chat with these messages, by the user and the model in turn. Returns its id."""
        name = ChatId(f"chat-{self.chats.name()}")
        summary = ChatSummary(name, title, NOON + self.chats.number, 0, pinned=pinned)
        self.chats.chats[name] = Chat(summary, ChatSettings(), (), None)
        parent: MessageId | None = None
        for place, text in enumerate(texts):
            message = MessageId(f"message-{self.chats.name()}")
            one = Message(message, parent, Role.USER, text, NOON)
            if place % 2:
                one = replace(one, role=Role.ASSISTANT, model=HERE.name, finish=Finish.COMPLETE, usage=USAGE)
            self.chats.put(name, one)
            parent = message
        return name
