"""Downloads: one at a time on this machine, resumed after an interruption, and checked before use."""
