"""Programs that use the server: how each of them is started, set up, and checked."""
