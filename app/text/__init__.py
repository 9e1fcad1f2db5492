"""Between text and token ids: vocabularies of every kind, detokenizing as it streams, what a terminal may be shown."""
