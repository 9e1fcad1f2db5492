"""Remove the guards of the product, one at a time, from a copy of the source, and check that a test fails for each.

    python -m tests.torture.removed_guards [NAME ...]

The program exits with status 1 if no test misses a guard, or if the tests fail with all guards.
"""

import sys

from tests.torture.planting import Fault, run

ACCESS, MIDDLEWARE = "app/server/http/access.py", "app/server/http/access_middleware.py"
BODY, CONNECTION, HOST = "app/server/http/request_body.py", "app/server/http/connection.py", "app/server/host.py"
BOXES, PAGE = "app/server/box_routing.py", "app/server/page/endpoints.py"
GGUF, SAFETENSORS, SHARDS = "quant/gguf.py", "quant/safetensors.py", "quant/safetensors_shards.py"
LISTING, INCOMING = "app/models/hub_listing.py", "app/models/transfer/incoming.py"
TEMPLATE, CHILD = "app/generation/template.py", "app/generation/template_child.py"
GRAMMARS, PROCESS = "app/generation/grammars.py", "app/grammars/process.py"
BATCH, BLOCKS, PREFIX = "engine/batch.py", "engine/kv/blocks.py", "engine/kv/prefix_cache.py"
SEGMENT, REDACTION, GUARD = "engine/kv/disk/segment_file.py", "app/doctor/redaction.py", "app/chat_backend/guard.py"
UNDO, TOOLS = "app/connect/undo.py", "app/chat_backend/tools.py"

HTTP, SERVER = "tests/app/server/http/", "tests/app/server/"
MODELS, GENERATION = "tests/app/models/", "tests/app/generation/"
DISK, CHAT, QUANT = "tests/engine/kv/disk/", "tests/app/chat_backend/", "tests/quant/"

GUARDS: dict[str, Fault] = {
    # -- access to the server
    "any Host is accepted": Fault(
        MIDDLEWARE,
        " or not self._names_this_server(hosts[0], scope):",
        ":",
        (f"{HTTP}test_access_middleware.py::test_foreign_hosts_are_refused_by_the_middleware_not_the_parser",),
    ),
    "any number of Hosts is accepted": Fault(
        MIDDLEWARE,
        "len(hosts) != 1 or ",
        "",
        (f"{HTTP}test_access_middleware.py::test_middleware_requires_exactly_one_host_without_a_parser",),
    ),
    "any Origin is accepted": Fault(
        MIDDLEWARE,
        "if any(origin not in own for",
        "if any(False for",
        (f"{HTTP}test_access_middleware.py::test_pages_of_other_origins_are_refused_on_every_path",),
    ),
    "any Sec-Fetch-Site is accepted": Fault(
        MIDDLEWARE,
        "if any(site not in _OWN_FETCH_SITES for",
        "if any(False for",
        (f"{HTTP}test_access_middleware.py::test_sec_fetch_site_decides_whether_a_page_is_refused",),
    ),
    "no key is needed": Fault(
        ACCESS,
        'if is_public(scope["method"], scope["path"]):',
        "if True:",
        (f"{HTTP}test_access.py::test_only_public_routes_answer_without_a_key",),
    ),
    "keys are compared with ==": Fault(
        ACCESS,
        "if hmac.compare_digest(expected, digest)]",
        "if expected == digest]",
        (f"{HTTP}test_access.py::test_every_key_is_compared_in_constant_time",),
    ),
    "the shared key is compared with ==": Fault(
        ACCESS,
        "hmac.compare_digest(_digest(shared.encode()), digest)",
        "_digest(shared.encode()) == digest",
        (f"{HTTP}test_access.py::test_every_key_is_compared_in_constant_time",),
    ),
    "programs of any user are served": Fault(
        ACCESS,
        " and uid == os.geteuid()",
        "",
        (f"{HTTP}test_access_peers.py::test_other_users_are_not_this_user",),
    ),
    "a key has no limit of requests": Fault(
        ACCESS,
        "if self._max_requests and ",
        "if False and ",
        (f"{HTTP}test_access_limits.py::test_failed_request_no_longer_counts",),
    ),
    "a public address needs no key": Fault(
        HOST,
        "if not is_loopback(host) and not chosen_keys(settings):",
        "if False:",
        ("tests/app/commands/test_serve.py::test_serving_other_machines_needs_a_key",),
    ),
    "the TLS port needs no key": Fault(
        HOST,
        "if settings.tls_port and not chosen_keys(settings) and shared_key(settings) is None:",
        "if False:",
        (f"{SERVER}test_tls.py::test_port_for_other_machines_needs_a_key_and_a_certificate",),
    ),
    "keys share the prefix cache": Fault(
        ACCESS,
        'f"key {digest.hex()}" if number else ""',
        '""',
        (f"{HTTP}test_access.py::test_keys_have_separate_caches_and_the_first_keeps_the_old_cache",),
    ),
    "a key sees requests of others": Fault(
        "app/server/origin.py",
        "return origin.cache_salt.startswith(caller_of(request).cache_salt)",
        "return True",
        (f"{SERVER}test_own_endpoints.py::test_other_keys_cannot_see_or_end_requests_of_the_owner",),
    ),
    # -- requests
    "a request has any number of headers": Fault(
        MIDDLEWARE,
        'if len(scope["headers"]) > MAX_HEADERS:',
        "if False:",
        (f"{SERVER}test_endless_heads.py::test_size_of_the_head_is_limited",),
    ),
    "a path has any length": Fault(
        MIDDLEWARE,
        "> MAX_TARGET_BYTES:",
        "> 1 << 30:",
        (f"{SERVER}test_endless_heads.py::test_size_of_the_head_is_limited",),
    ),
    "a body has any size": Fault(
        BODY,
        "if size > MAX_BODY_BYTES:",
        "if False:",
        (f"{SERVER}test_bad_requests.py::test_body_over_the_limit_is_refused",),
    ),
    "a body has any number of values": Fault(
        BODY,
        'if structure is None or _containers(structure) > MAX_CONTAINERS or _count(structure, b",") > MAX_VALUES:',
        "if structure is None:",
        (f"{HTTP}test_request_body.py::test_too_many_values_are_refused_before_decoding",),
    ),
    "a body has any depth": Fault(
        BODY,
        "if _depth(structure) > MAX_DEPTH:",
        "if False:",
        (f"{HTTP}test_request_body.py::test_nesting_is_accepted_up_to_the_limit",),
    ),
    "a page may send a body of any type": Fault(
        BODY,
        ' and "origin" not in headers)',
        ")",
        (f"{SERVER}page/test_endpoints.py::test_posts_are_accepted_from_the_page_and_refused_from_others",),
    ),
    "a body may be slow": Fault(
        BODY,
        "asyncio.timeout(BODY_SECONDS)",
        "asyncio.timeout(1e6)",
        (f"{HTTP}test_connection.py::test_unfinished_body_gets_408_and_closes_the_connection",),
    ),
    "a head may be slow": Fault(
        CONNECTION,
        "        self._start_head_timer()\n        if len(",
        "        if len(",
        (f"{HTTP}test_connection.py::test_unfinished_head_closes_the_connection",),
    ),
    "any number of connections is open": Fault(
        CONNECTION,
        "if len(self.connections) > MAX_CONNECTIONS:",
        "if False:",
        (f"{HTTP}test_connection.py::test_connections_over_the_limit_are_closed",),
    ),
    "any number of background responses wait": Fault(
        "app/server/dialects/responses/background.py",
        "if len(self._running) >= MAX_RUNNING:",
        "if False:",
        (f"{SERVER}dialects/responses/test_responses.py::test_background_responses_over_the_limit_get_429",),
    ),
    # -- the page for browsers
    "the page has no policy": Fault(
        PAGE,
        '    "content-security-policy": _POLICY,\n',
        "",
        (f"{SERVER}page/test_endpoints.py::test_every_file_has_the_headers_and_all_are_small",),
    ),
    "the policy allows inline scripts": Fault(
        PAGE,
        "script-src 'self';",
        "script-src 'self' 'unsafe-inline';",
        (f"{SERVER}page/test_endpoints.py::test_policy_allows_only_files_of_the_server",),
    ),
    "any file beside the page is sent": Fault(
        PAGE,
        "if name not in FILES:",
        "if False:",
        (f"{SERVER}page/test_endpoints.py::test_other_names_are_not_files_of_the_page",),
    ),
    # -- boxes
    "a box has any certificate": Fault(
        "app/client/pinned_tls.py",
        "if not hmac.compare_digest(found, fingerprint):",
        "if False:",
        (f"{SERVER}test_box_routing.py::test_wrong_certificate_is_refused_with_both_fingerprints",),
    ),
    "a box gets the keys of clients": Fault(
        BOXES,
        "accept-encoding expect authorization x-api-key cookie",
        "accept-encoding expect cookie",
        (f"{SERVER}test_hostile_boxes.py::test_request_without_keys_and_hop_headers_reaches_the_box",),
    ),
    "a box sets any header": Fault(
        BOXES,
        " if name.lower() in _PASSED_BACK]",
        "]",
        (f"{SERVER}test_hostile_boxes.py::test_only_known_headers_are_passed_back",),
    ),
    # -- model files
    "a GGUF tensor ends after the file": Fault(
        GGUF,
        "if start + tensor.nbytes > self._size:",
        "if False:",
        (f"{QUANT}test_gguf.py::test_every_truncation_is_rejected",),
    ),
    "GGUF tensors overlap": Fault(
        GGUF, "if start < end:", "if False:", (f"{QUANT}test_gguf.py::test_overlapping_tensors_are_rejected",)
    ),
    "a GGUF count exceeds the file": Fault(
        GGUF,
        "if count * smallest > self._limit - self._at:",
        "if False:",
        (f"{QUANT}test_gguf.py::test_array_length_is_limited",),
    ),
    "a GGUF header has any size": Fault(
        GGUF, "min(self._size, MAX_HEADER_BYTES)", "self._size", (f"{QUANT}test_gguf.py::test_header_size_is_limited",)
    ),
    "a GGUF alignment is any number": Fault(
        GGUF,
        " or alignment & (alignment - 1):",
        ":",
        (f"{QUANT}test_gguf.py::test_alignment_must_be_a_power_of_two_within_limits",),
    ),
    "a safetensors header exceeds the file": Fault(
        SAFETENSORS,
        "if self._data_start > self._size:",
        "if False:",
        (f"{QUANT}test_safetensors.py::test_forged_header_length_is_rejected",),
    ),
    "safetensors offsets exceed the file": Fault(
        SAFETENSORS,
        "not offsets[0] <= offsets[1] <= most:",
        "not offsets[0] <= offsets[1]:",
        (f"{QUANT}test_safetensors.py::test_malformed_header_names_the_field",),
    ),
    "safetensors offsets differ from the shape": Fault(
        SAFETENSORS,
        "if bits != 8 * nbytes:",
        "if False:",
        (f"{QUANT}test_safetensors.py::test_malformed_header_names_the_field",),
    ),
    "JSON has any number of values": Fault(
        "quant/bounded_json.py",
        "> MAX_VALUES:",
        "> 1 << 40:",
        (f"{QUANT}test_safetensors.py::test_header_with_too_many_values_is_not_parsed",),
    ),
    "an index names any file": Fault(
        SHARDS,
        "or not _SHARD.fullmatch(shard) or _DEVICE.match(shard):",
        ":",
        (f"{QUANT}test_safetensors_shards.py::test_hostile_shard_names_open_no_file",),
    ),
    "a link leads anywhere": Fault(
        SHARDS,
        "if os.path.islink(link) and not _is_blob(link, folder):",
        "if False:",
        (f"{QUANT}test_safetensors_shards.py::test_links_in_a_plain_folder_are_rejected",),
    ),
    "a truncated file is read": Fault(
        "quant/mapped_file.py",
        "if (size := self._map.size()) < end:",
        "if (size := self._map.size()) < 0:",
        (f"{QUANT}test_gguf.py::test_file_that_is_truncated_after_it_was_opened_is_not_read",),
    ),
    "memory is not checked before a load": Fault(
        "engine/kv/budget.py",
        "if rest <= 0 or needed > limit:",
        "if False:",
        ("tests/engine/test_fit.py::test_model_that_does_not_fit_is_rejected_before_reading_weights",),
    ),
    # -- downloads
    "a download has any path": Fault(
        LISTING,
        " and FILE.fullmatch(name)",
        "",
        (f"{MODELS}test_hub_models.py::test_unsafe_file_names_are_ignored",),
    ),
    "a blob has any name": Fault(
        LISTING,
        " and DIGEST.fullmatch(digest)",
        "",
        (f"{MODELS}test_hub_models.py::test_files_with_unsafe_digests_are_ignored",),
    ),
    "a list of files has any size": Fault(
        "app/models/hub.py",
        "if len(raw) > limit:",
        "if False:",
        (f"{MODELS}test_hub_models.py::test_oversized_file_list_is_refused",),
    ),
    "a download has any digest": Fault(
        INCOMING,
        "if self._hash.hexdigest() != self.digest:",
        "if False:",
        (f"{MODELS}test_store.py::test_wrong_bytes_are_not_stored",),
    ),
    "a download has any length": Fault(
        INCOMING,
        "if self.received > self.size:",
        "if False:",
        (f"{MODELS}test_store.py::test_surplus_byte_stops_the_download",),
    ),
    "the token is sent in clear text": Fault(
        "app/models/hub.py",
        " and _keeps_secrets(settings.hub_endpoint)",
        "",
        (f"{MODELS}test_sources.py::test_token_is_sent_over_secure_connections_only",),
    ),
    "a web address needs no digest": Fault(
        "app/models/web_models.py",
        'if not found["digest"]:',
        "if False:",
        (f"{MODELS}test_web_models.py::test_incomplete_addresses_are_refused",),
    ),
    # -- chat templates and grammars
    "templates use any attribute": Fault(
        CHILD,
        "    intercepted_binops = frozenset(_CHECKS)\n",
        "    intercepted_binops = frozenset(_CHECKS)\n\n"
        "    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:\n        return True\n",
        (f"{GENERATION}test_template.py::test_sandbox_escapes_fail",),
    ),
    "templates change the conversation": Fault(
        CHILD,
        "class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):",
        "class Sandbox(jinja2.sandbox.SandboxedEnvironment):",
        (f"{GENERATION}test_template.py::test_sandbox_escapes_fail",),
    ),
    "templates open files": Fault(
        CHILD,
        "            (resource.RLIMIT_NOFILE, 0),  # no more files, sockets, or programs can be opened\n",
        "",
        (f"{GENERATION}test_template.py::test_template_that_escapes_the_sandbox_cannot_open_files",),
    ),
    "templates use any memory": Fault(
        CHILD,
        "            (resource.RLIMIT_AS, limits.memory_bytes),\n",
        "",
        (f"{GENERATION}test_template.py::test_memory_of_both_processes_is_limited",),
    ),
    "templates multiply without a limit": Fault(
        CHILD,
        "_CHECKS[operator](left, right)",
        "pass",
        (f"{GENERATION}test_template.py::test_expensive_templates_are_refused_before_the_deadline",),
    ),
    "templates run without a deadline": Fault(
        TEMPLATE,
        "threading.Timer(seconds, expire)",
        "threading.Timer(1e6, expire)",
        (f"{GENERATION}test_template.py::test_endless_templates_are_killed",),
    ),
    "a template has any length": Fault(
        TEMPLATE,
        "if len(source) > MAX_TEMPLATE_BYTES:",
        "if False:",
        (f"{GENERATION}test_template.py::test_long_templates_are_refused",),
    ),
    "messages contain control tokens": Fault(
        "app/text/tokenizer.py",
        "protected = self._vocabulary.control.protect(content)",
        "protected = content",
        (f"{GENERATION}test_service.py::test_control_tokens_in_messages_stay_text",),
    ),
    "a grammar has any length": Fault(
        GRAMMARS,
        "if len(source.text) > MAX_SOURCE:",
        "if False:",
        (f"{GENERATION}test_grammars.py::test_large_grammars_are_refused",),
    ),
    "a grammar compiles for any time": Fault(
        PROCESS,
        "with _within(limits.compile_cpu_seconds, limits.compile_wall_seconds):",
        "if True:",
        ("tests/app/grammars/test_processes.py::test_slow_grammar_is_refused_and_delays_no_other",),
    ),
    "a grammar takes any memory": Fault(
        PROCESS,
        "        _limit_memory(limits.memory_bytes)\n",
        "",
        ("tests/app/grammars/test_processes.py::test_memory_is_limited",),
    ),
    "a mask takes any time": Fault(
        PROCESS,
        "with _within(limits.mask_cpu_seconds * steps_of(frame)):",
        "if True:",
        ("tests/app/grammars/test_processes.py::test_slow_mask_ends_only_its_own_reply",),
    ),
    # -- the engine and its caches
    "a block is outside of its pool": Fault(
        BATCH,
        "if not NULL_BLOCK <= min(table) <= max(table) < num_blocks or NULL_BLOCK in table[first:needed]:",
        "if False:",
        ("tests/engine/test_batch.py::test_out_of_range_indices_raise",),
    ),
    "a state is outside of its pool": Fault(
        BATCH,
        "if copy.group == number and not (",
        "if False and not (",
        ("tests/engine/test_batch.py::test_states_outside_of_the_pool_raise",),
    ),
    "a token is outside of the vocabulary": Fault(
        BATCH,
        "if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:",
        "if False:",
        ("tests/engine/test_batch.py::test_out_of_range_indices_raise",),
    ),
    "a block is released twice": Fault(
        BLOCKS,
        "if not 0 < block < self.num_blocks or self._references[block] == 0:",
        "if False:",
        ("tests/engine/kv/test_blocks.py::test_releasing_a_block_that_is_not_held_raises",),
    ),
    "a key is enough to find a block": Fault(
        BLOCKS,
        "and content.token_ids == tuple(token_ids) else",
        "else",
        ("tests/engine/kv/test_blocks.py::test_key_with_other_tokens_is_a_miss",),
    ),
    "the prefix cache has no salt": Fault(
        PREFIX,
        "root_key(*self._config.cache_salt, held.request.origin.cache_salt)",
        "root_key(*self._config.cache_salt)",
        (f"{HTTP}test_access.py::test_cached_prompts_of_another_key_are_not_reported",),
    ),
    "data on disk is not verified": Fault(
        SEGMENT,
        "if zlib.crc32(data, _seed(index, head.header.identity)) != head.entries[index].checksum:",
        "if False:",
        (f"{DISK}test_segment_file.py::test_damage_to_any_data_byte_is_found",),
    ),
    "tables on disk are not verified": Fault(
        SEGMENT,
        "return content if _CHECKSUM.pack(zlib.crc32(content, seed)) == checksum else None",
        "return content",
        (f"{DISK}test_segment_file.py::test_damage_to_any_header_byte_is_found",),
    ),
    "files of any version are read": Fault(
        SEGMENT,
        "if (version, blocks) != (VERSION, SEGMENT_BLOCKS):",
        "if False:",
        (f"{DISK}test_segment_file.py::test_other_magic_and_versions_are_rejected",),
    ),
    "files of another model are read": Fault(
        "engine/kv/disk/store.py",
        "if header.fingerprint != self._fingerprint:",
        "if False:",
        (f"{DISK}test_store.py::test_files_of_another_model_are_a_miss",),
    ),
    "files that others can write are read": Fault(
        SEGMENT,
        " or status.st_mode & 0o077):",
        "):",
        (f"{DISK}test_segment_file.py::test_files_with_permissions_for_other_users_are_rejected",),
    ),
    "links to cache files are followed": Fault(
        SEGMENT,
        'getattr(os, "O_NOFOLLOW", 0) | ',
        "",
        (f"{DISK}test_segment_file.py::test_link_created_after_the_check_is_not_followed",),
    ),
    # -- secrets
    "cache files are not private": Fault(
        SEGMENT,
        "        os.chmod(unfinished, 0o600)",
        "        os.chmod(unfinished, 0o644)",
        (f"{DISK}test_segment_file.py::test_files_have_mode_0600_under_any_umask",),
    ),
    "folders are not private": Fault(
        "engine/private_folder.py",
        "folder.mkdir(0o700)\n                folder.chmod(0o700)",
        "folder.mkdir()",
        ("tests/engine/test_private_folder.py::test_private_folders_have_mode_0700_under_any_umask",),
    ),
    "the history is not private": Fault(
        "app/private_database.py",
        "os.O_RDWR | os.O_CREAT, 0o600)",
        "os.O_RDWR | os.O_CREAT, 0o644)",
        ("tests/app/test_private_database.py::test_new_file_is_private_and_existing_file_is_kept",),
    ),
    "others can read the key file": Fault(
        "app/settings/api_keys.py",
        " or found.st_mode & 0o077:",
        ":",
        ("tests/app/settings/test_api_keys.py::test_key_file_with_open_permissions_is_refused",),
    ),
    "the bundle has known secrets": Fault(
        REDACTION,
        "for secret in _secrets(settings)]",
        "for secret in ()]",
        ("tests/app/doctor/test_bundle.py::test_archive_has_no_planted_secret",),
    ),
    "the bundle has tokens": Fault(
        REDACTION,
        "    rules += [(form, SECRET) for form in _FORMS]\n",
        "",
        ("tests/app/doctor/test_bundle.py::test_archive_has_no_planted_secret",),
    ),
    "the bundle names user and machine": Fault(
        REDACTION,
        "for name in found if name",
        "for name in found if not name",
        ("tests/app/doctor/test_bundle.py::test_archive_has_no_planted_secret",),
    ),
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
        ("tests/tui/test_hostile_text.py::test_markup_in_names_titles_and_errors_is_plain_text",),
    ),
    "entities in Markdown control the terminal": Fault(
        "tui/markdown.py",
        "child.content = sanitize(child.content)",
        "pass",
        ("tests/tui/test_hostile_text.py::test_markup_in_names_titles_and_errors_is_plain_text",),
    ),
    "the plain chat controls the terminal": Fault(
        "app/chat_backend/plain/plain_chat.py",
        'f"{sanitize(line)}\\n"',
        'f"{line}\\n"',
        (f"{CHAT}plain/test_plain_chat.py",),
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
        (f"{CHAT}test_guard.py::test_killing_the_guard_ends_its_child",),
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
    "a tool server sends any amount": Fault(
        "app/mcp/stdio.py",
        "if self._unsolicited > MAX_UNSOLICITED or self._num_messages > MAX_MESSAGES:",
        "if False:",
        ("tests/app/mcp/test_server.py::test_server_that_dies_or_floods_fails_the_call",),
    ),
    # -- files that several processes use
    "settings are written before their record": Fault(
        UNDO,
        "            self._write(client, Record(unfinished, known))\n",
        "",
        ("tests/app/connect/test_undo.py::test_killed_processes_leave_whole_files_that_can_be_restored",),
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
    "a history of a newer version is opened": Fault(
        "app/history/integrity.py",
        "if version > VERSION:",
        "if False:",
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


if __name__ == "__main__":
    sys.exit(run(GUARDS, __doc__))
