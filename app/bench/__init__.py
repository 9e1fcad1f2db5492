"""`ingle bench`: how fast this program generates tokens on this machine."""
