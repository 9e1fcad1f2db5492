"""The guards of the engine and its caches, and of secrets."""

from tests.torture.planting import Fault

BATCH = "engine/batch.py"
BLOCKS = "engine/kv/blocks.py"
PREFIX = "engine/kv/prefix_cache.py"
SEGMENT = "engine/kv/disk/segment_file.py"
REDACTION = "app/doctor/redaction.py"
HTTP = "tests/app/server/http/"
DISK = "tests/engine/kv/disk/"

GUARDS: dict[str, Fault] = {
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
}
