"""The chat in the terminal, built with Textual. It uses the rest of the program only through the protocols in
`client.py`.
"""
