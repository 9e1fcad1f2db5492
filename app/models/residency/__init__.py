"""Which models of a server are in memory: loads on demand, unloads for memory, and the ledger."""
