"""The guards of models: readers of files, downloads, chat templates, and grammars."""

from tests.torture.planting import Fault

GGUF = "quant/gguf.py"
SAFETENSORS = "quant/safetensors.py"
SHARDS = "quant/safetensors_shards.py"
LISTING = "app/models/hub_listing.py"
INCOMING = "app/models/transfer/incoming.py"
TEMPLATE = "app/generation/template.py"
CHILD = "app/generation/template_child.py"
GRAMMARS = "app/generation/grammars.py"
PROCESS = "app/grammars/process.py"
MODELS = "tests/app/models/"
GENERATION = "tests/app/generation/"
QUANT = "tests/quant/"

GUARDS: dict[str, Fault] = {
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
        (f"{QUANT}test_gguf.py::test_count_that_exceeds_the_file_is_refused_at_once",),
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
        "quant/tensor_file.py",
        "            if not count:\n",
        "            if not count and not (count := len(data) - done):\n",
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
        (f"{GENERATION}test_template.py::test_memory_of_compiled_templates_is_released",),
    ),
    "templates compute results of any size": Fault(
        CHILD,
        "_CHECKS[operator](left, right)",
        "pass",
        (f"{GENERATION}test_template.py::test_operators_with_large_results_are_refused",),
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
        (f"{GENERATION}test_template.py::test_templates_are_accepted_up_to_the_limit_of_their_length",),
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
        ("tests/app/grammars/test_processes.py::test_cpu_time_is_limited",),
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
}
