"""A conversation: its messages, the template that makes them a prompt, and the events of the reply."""
