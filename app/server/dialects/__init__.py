"""What clients speak: a folder for each wire format. All ask the same chat service, and none has a logic of its own for
sampling, tools or streams."""
