"""The user's chats in one SQLite file: crash-safe, repairable, searchable, with import and export."""
