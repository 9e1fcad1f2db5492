"""The widgets, one per module. They post messages about what happened, and call only the client that they are given."""
