"""Formats sizes, times, token counts, and the cost of a reply as text."""

import time
from datetime import date

from tui.engine_types import Loading
from tui.plain_text import model_name, single_line, start, without_fences
from tui.types import AUTHORS, ContextBudget, Finish, Message, Usage

_SIZES = ("B", "kB", "MB", "GB", "TB")


def size(count: int | None) -> str:
    """Format a number of bytes with three digits: 98.4 MB. Returns "" for None."""
    if count is None:
        return ""
    value = float(count)
    for unit in _SIZES:
        if value < 999.5 or unit == _SIZES[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def approximate_size(count: int | None, *, is_estimate: bool) -> str:
    """Format a number of bytes, marked as approximate if it is an estimate: ~2.5 GB."""
    return f"{'~' if is_estimate else ''}{size(count)}"


def size_of(done: int, total: int) -> str:
    """Format a part of a number of bytes: "30.1 of 98.4 MB", "0.8 of 98.4 MB", "0.0 of 98.4 MB"."""
    unit = size(total).rpartition(" ")[2]
    value = done / 1000 ** _SIZES.index(unit)
    return f"{value:.{0 if value >= 99.95 or unit == 'B' else 1}f} of {size(total)}"


def short_count(count: int) -> str:
    """Format a count in few characters: 812, 3.7k, 128k, 1.1M."""
    if abs(count) < 1000:
        return str(count)
    thousands = count / 1000
    if abs(count) >= 999_500:
        return f"{thousands / 1000:.1f}M"
    return f"{thousands:.1f}k" if abs(count) < 9950 else f"{thousands:.0f}k"


def seconds(value: float) -> str:
    """Format a duration in few characters: 85 ms, 0.41 s, 12.3 s, 3 min 25 s."""
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def time_left(value: float) -> str:
    """Format an estimate of the time left: 40 s left, 12 min left, 3 h left."""
    minutes = value / 60
    words = f"{value:.0f} s" if value < 100 else f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.0f} h"
    return f"{words} left"


_AGES = (
    (3600, 60, "min"),
    (86_400, 3600, "h"),
    (7 * 86_400, 86_400, "d"),
)  # rows of (upper limit in seconds, unit in seconds, name of the unit)


def age(moment: float, now: float) -> str:
    """Format an age: just now, 5 min ago, 22 h ago, 6 d ago. After a week, return the date: 2026-01-31.

    Both times are in seconds since the epoch.
    """
    since = now - moment
    if since < 60:
        return "just now"
    for most, unit, name in _AGES:
        if since < most:
            return f"{since // unit:.0f} {name} ago"
    return time.strftime("%Y-%m-%d", time.localtime(moment))


def short_age(moment: float, now: float) -> str:
    """Format an age in at most 3 characters: now, 5m, 22h, 6d. Returns "" after a week."""
    number, *rest = age(moment, now).split()
    if not rest:
        return ""
    return "now" if number == "just" else f"{number}{rest[0][0]}"


def day_group(moment: float, now: float) -> str:
    """Return the heading for a time in a list that is grouped by day: Today, Yesterday, Last 7 days, or Older."""
    days = (_day(now) - _day(moment)).days
    return "Today" if days < 1 else "Yesterday" if days < 2 else "Last 7 days" if days < 8 else "Older"


def _day(moment: float) -> date:
    return date.fromtimestamp(moment)


def percent(used: int, total: int) -> str:
    return share(used / total) if total else ""


def share(fraction: float) -> str:
    """Format a fraction: 15 %."""
    return f"{100 * fraction:.0f} %"


def rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def bar(done: int, total: int, cells: int) -> str:
    """Draw a fraction as a bar of `cells` cells."""
    full = min(cells, cells * done // total) if total else 0
    return "━" * full + "─" * (cells - full)


def expected_speed(tokens_per_second: float | None) -> str:
    """Format an estimated speed of replies: "~25 tok/s", "~2.4 tok/s". Returns "" if it is unknown."""
    if not tokens_per_second:
        return ""
    return f"~{tokens_per_second:.{0 if tokens_per_second >= 9.95 else 1}f} tok/s"


def brief_cost(usage: Usage) -> str:
    """Return a short form of a reply's cost: "212 tokens · 45 tok/s · 0.41 s to first"."""
    first = f"{seconds(usage.first_token_seconds)} to first"
    if usage.is_detailed and not (usage.reply_tokens or usage.reply_seconds):
        return "no tokens"
    return " · ".join(filter(None, (brief_speed(usage), first)))


def brief_speed(usage: Usage) -> str:
    """Return "212 tokens · 45 tok/s". Unknown values are omitted."""
    tokens = f"{usage.reply_tokens:,} {'token' if usage.reply_tokens == 1 else 'tokens'}" if usage.reply_tokens else ""
    speed = f"{usage.tokens_per_second:.0f} tok/s" if usage.tokens_per_second > 0 else ""
    return " · ".join(filter(None, (tokens, speed)))


def details(usage: Usage) -> list[str]:
    """Return the full cost of a reply, one fact each: reply, drafts, prompt, cache miss, and sampling of a retry."""
    drafts = f"{usage.accepted_tokens:,} of {usage.drafted_tokens:,} drafted tokens accepted"
    miss = f"cache miss: {usage.miss}" if usage.miss else ""
    lines = (reply_cost(usage), drafts * bool(usage.drafted_tokens), prompt_cost(usage), miss, retry_note(usage))
    return [line for line in lines if line]


def prompt_cost(usage: Usage) -> str:
    """Return the sources of the prompt's tokens: "1,204 of 1,235 prompt tokens cached (1,188 device, 16 disk)".

    The sources are omitted if all cached tokens were in the device's memory. If the server reports no details, return
    only the numbers of prompt tokens and cached tokens; "" if unknown.
    """
    sources, reused = usage.sources, usage.sources.cached
    if not usage.is_detailed:
        known = f", {reused:,} cached" if reused else ""
        return f"{usage.prompt_tokens:,} prompt tokens{known}" if usage.prompt_tokens else ""
    tiers = [("device", sources.device), ("RAM", sources.host), ("disk", sources.disk)]
    used = [f"{count:,} {name}" for name, count in tiers if count]
    counts = ", ".join(used) if len(used) > 1 or not sources.device else ""
    return f"{reused:,} of {usage.prompt_tokens:,} prompt tokens cached{f' ({counts})' if counts else ''}"


def reply_cost(usage: Usage) -> str:
    """Return how long a reply took: "212 tokens · 45.2 tok/s · 0.41 s to first token (queue 2 ms, prefill 0.41 s)".

    For a reply that was stopped before its first token: "stopped before the first token (3.20 s)". Unknown values are
    omitted.
    """
    first = seconds(usage.first_token_seconds)
    if usage.is_detailed and not (usage.reply_tokens or usage.reply_seconds):
        return f"stopped before the first token ({first})"
    parts = [f"{usage.reply_tokens:,} {'token' if usage.reply_tokens == 1 else 'tokens'}"] if usage.reply_tokens else []
    if usage.tokens_per_second > 0:
        parts.append(f"{usage.tokens_per_second:.1f} tok/s")
    detail = f" (queue {seconds(usage.queue_seconds)}, prefill {seconds(usage.prompt_seconds)})"
    parts.append(f"{first} to first token{detail if usage.is_detailed else ''}")
    return " · ".join(parts)


def loading(now: Loading) -> str:
    """Describe the progress of loading on one line: "Loading m: 31 %, 30.1 of 98.4 MB", "m: Unpacking, 90 %"."""
    name = model_name(now.model)
    stage = now.stage.replace(now.model, name)
    head, mark = (stage, ": ") if f" {name} " in f" {stage} " else (f"{name}: {stage}", ", ")
    done = "" if now.fraction is None else share(now.fraction)
    figures = ", ".join(filter(None, (done, now.amount)))
    return single_line(f"{head}{mark}{figures}" if figures else head)


def message_line(message: Message, most: int) -> str:
    """Return the author and at most `most` characters of a message: "Reply: Of course …"."""
    empty = "(files)" if message.attachments else _TEXTLESS.get(message.finish, "(no text)")
    return f"{AUTHORS[message.role]}: {start(without_fences(message.full_text), most) or empty}"


def budget(context: ContextBudget) -> str:
    """Describe a context budget: "context 15 % · 7.0k tokens free", or what is lacking for a reply.

    Without a known limit: "331 tokens (limit unknown)".
    """
    if context.limit is None or context.unused is None:
        return budget_share(context)
    if context.lacking:
        tokens = "token" if context.lacking == 1 else "tokens"
        return f"{budget_share(context)} · a reply needs {short_count(context.lacking)} more {tokens}"
    return f"{budget_share(context)} · {_tokens(context.unused)} free"


def _tokens(number: int) -> str:
    return f"{short_count(number)} {'token' if number == 1 else 'tokens'}"


def budget_share(context: ContextBudget) -> str:
    """Return the share of the context that the prompt takes: "context 15 %". At most 100 %."""
    if context.limit is None:
        return f"{_tokens(context.used)} (limit unknown)"
    return f"context {percent(min(context.used, context.limit), context.limit)}"


def budget_details(context: ContextBudget) -> str:
    """Describe the parts of a context budget.

    Example: "System prompt 120 + messages 1,100 = 15 % of 8,192 tokens. 1,024 tokens are kept free for the reply."
    """
    prompt = f"System prompt {context.system:,} + messages {context.history:,}"
    share = "" if context.limit is None else f"{_share(context.used, context.limit)} of "
    total = f"{context.limit or context.used:,} tokens"
    return f"{prompt} = {share}{total}. {context.reserve:,} tokens are kept free for the reply."


def _share(used: int, limit: int) -> str:
    """Return a share in percent; above 100 %, return the tokens: "9,120"."""
    return percent(used, limit) if used <= limit else f"{used:,}"


def retry_note(usage: Usage) -> str:
    """Explain the temperature of a retry that differs from the settings; "" if it does not."""
    if usage.retry_temperature is None:
        return ""
    return f"temperature {usage.retry_temperature:g} for this retry: at temperature 0 it would repeat the reply"


FINISHES = {
    Finish.LENGTH: "Reply cut at its limit of tokens. Raise Max tokens in the settings.",
    Finish.CONTEXT_FULL: "Reply cut because the context is full. /room removes old messages from it.",
    Finish.STOPPED: "You stopped this reply.",
    Finish.FAILED: "The reply failed.",
    Finish.CUT_OFF: "Interrupted: Inglenook closed during this reply.",
    Finish.ELSEWHERE: "Another window is writing this reply.",
    Finish.UNANSWERED: "No reply yet.",
}
"""Labels of replies that are not complete."""

_TEXTLESS = {
    None: "(no text yet)",
    Finish.ELSEWHERE: "(no text yet)",
    Finish.STOPPED: "(stopped before its first word)",
    Finish.FAILED: "(failed before its first word)",
    Finish.CUT_OFF: "(interrupted before its first word)",
}
