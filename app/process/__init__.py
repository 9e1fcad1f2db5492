"""Processes of this machine: servers that run, sockets, signals, child processes, and thread pools."""
