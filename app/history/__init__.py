"""The chats of this user in one file: kept whatever dies, searched, and taken from and given to other programs."""
