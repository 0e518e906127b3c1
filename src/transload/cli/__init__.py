"""The command line: a static table of commands, of which only the one that is named gets imported."""

COMMANDS: dict[str, str] = {
    "check": "whether a checkpoint loads here, where it lands, and what torch.load would say",
    "doctor": "why PyTorch does not see the GPU: the cause, the evidence, and the fix",
    "inspect": "what is in a checkpoint, who wrote it, and whether it is safe and whole",
    "retag": "change the device tags of a checkpoint in place, so that it loads anywhere",
}
"""Each command and its line of help. Its module is of the same name in this package, and has

``add_arguments(parser)``, which declares its options and an ``epilog`` of examples, and ``run(arguments) -> int``,
which returns the exit code.
"""
