"""One module a screen, with its styles beside it."""
