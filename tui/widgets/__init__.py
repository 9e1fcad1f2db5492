"""The widgets, one in each module. They report events with messages, and call only the client that they receive."""
