"""The guards of the terminal and the chat, and of files that several programs use."""

from tests.torture.planting import Fault

GUARD = "app/chat_backend/guard.py"
UNDO = "app/connect/undo.py"
TOOLS = "app/chat_backend/tools.py"
CHAT = "tests/app/chat_backend/"

GUARDS: dict[str, Fault] = {
    # -- the terminal and the chat
    "replies of ingle run control the terminal": Fault(
        "app/commands/run.py",
        "click.echo(sanitize(event.text), nl=False)\n",
        "click.echo(event.text, nl=False)\n",
        ("tests/app/commands/test_run_text.py::test_replies_and_reasoning_have_no_escape_sequences",),
    ),
    "texts in the chat control the terminal": Fault(
        "tui/types.py",
        "sanitize(value))",
        "value)",
        ("tests/tui/test_hostile_text.py::test_texts_from_the_backend_have_no_control_characters",),
    ),
    "entities in Markdown control the terminal": Fault(
        "tui/markdown.py",
        "child.content = sanitize(child.content)",
        "pass",
        ("tests/tui/test_markdown.py::test_links_show_their_address_and_html_is_text",),
    ),
    "the plain chat controls the terminal": Fault(
        "app/chat_backend/plain/plain_chat.py",
        'f"{sanitize(line)}\\n"',
        'f"{line}\\n"',
        (f"{CHAT}plain/test_plain_chat.py::test_typed_names_have_no_control_characters_in_the_output",),
    ),
    "the terminal is not restored": Fault(
        GUARD,
        "    _restore(terminal, before, in_order=left and status >= 0)\n",
        "",
        (f"{CHAT}test_guard.py::test_terminal_is_restored_however_the_child_ends",),
    ),
    "a chat survives its guard": Fault(
        GUARD,
        "        _die_with_parent(os.getppid())\n",
        "",
        (f"{CHAT}test_guard.py::test_killing_a_guard_below_a_shell_ends_its_child",),
    ),
    "a chat is deleted without a question": Fault(
        "tui/widgets/chat_list.py",
        'if await confirm(self, "Delete this chat?", about, "Delete"):',
        "if about:",
        ("tests/tui/test_chats.py::test_chats_are_listed_opened_renamed_pinned_archived_deleted_and_restored",),
    ),
    "tools run without a question": Fault(
        TOOLS,
        "asks = call.name in offered.by_name and not await self._is_allowed(chat, call.name)",
        "asks = False",
        (f"{CHAT}test_tools.py::test_call_runs_after_the_user_allows_it",),
    ),
    "a denied tool runs": Fault(
        TOOLS,
        "if permission is types.Permission.DENY:",
        "if False:",
        (f"{CHAT}test_tools.py::test_denied_call_is_reported_to_the_model",),
    ),
    "tool servers get secrets of the environment": Fault(
        "app/mcp/stdio.py",
        "env={**get_default_environment(), ",
        "env={**os.environ, ",
        ("tests/app/mcp/test_server.py::test_server_receives_no_secrets_of_the_environment",),
    ),
    # -- files that several processes use
    "settings are written before their record": Fault(
        UNDO,
        "            self._write(client, Record(unfinished, known))\n",
        "",
        ("tests/app/connect/test_undo.py::test_settings_can_be_undone_if_the_process_ends_between_file_and_record",),
    ),
    "a key is written to a file that others can read": Fault(
        UNDO,
        "            check_private(target.path)\n",
        "            pass\n",
        ("tests/app/connect/test_undo.py::test_key_is_not_written_to_a_file_that_others_can_read",),
    ),
    "a changed setting is overwritten": Fault(
        UNDO,
        "if file.wrote(change, value):",
        "if True:",
        ("tests/app/connect/test_undo.py::test_value_that_has_changed_since_is_left_and_reported",),
    ),
    "several processes open a history": Fault(
        "app/history/opening.py",
        "with _opening_lock(path, tell):",
        "if True:",
        ("tests/app/history/test_opening.py::test_repair_by_another_process_is_waited_for",),
    ),
    "the history of a newer version is repaired": Fault(
        "app/history/rescue.py",
        "pages = read_pages(path) if stated > VERSION else []",
        "pages = []",
        ("tests/app/history/test_opening.py::test_log_of_a_newer_program_is_left_unchanged",),
    ),
    "a server holds no lock": Fault(
        "app/process/instance.py",
        "    lock.acquire(timeout=_LOCK_SECONDS)\n",
        "",
        ("tests/app/process/test_instance.py::test_server_waits_until_a_stopping_server_removes_its_record",),
    ),
    "an archive has any size": Fault(
        "app/commands/archive.py",
        "if one.file_size > _LIMITS[one.filename] or is_bomb:",
        "if False:",
        ("tests/app/commands/test_archive.py::test_damaged_and_hostile_archives_change_nothing",),
    ),
}
