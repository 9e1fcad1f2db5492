"""Processes and what they share: running servers, sockets, signals, child processes, and thread pools."""
