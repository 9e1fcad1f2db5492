"""HTTP below the dialects: connections, access, request bodies, replies, and errors."""
