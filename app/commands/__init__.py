"""The sub-commands of `ingle`, one module each, imported when the command is run. app/cli.py has the table of them."""
