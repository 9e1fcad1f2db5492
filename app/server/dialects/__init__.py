"""The wire formats, one folder for each API. All use the same chat service; sampling, tools, and streams work alike in
all.
"""
