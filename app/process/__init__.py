"""Running servers, listening sockets, signals, child processes, and thread pools."""
