"""The plain chat: reads and prints lines instead of using screens."""
