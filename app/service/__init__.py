"""The server as a service of this user, which the system starts: systemd, launchd, or the Task Scheduler."""
