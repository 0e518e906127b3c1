"""The command line: a static table of commands, of which only the one that is named gets imported."""

COMMANDS: dict[str, str] = {
    "check": "whether a checkpoint loads here, where it lands, what torch.load says",
    "convert": "a checkpoint as safetensors, torch zip, npz or raw, without torch",
    "doctor": "why PyTorch does not see the GPU: the cause, the proof, and the fix",
    "explain": "what an error text means, and what to do: a traceback, a log, a pipe",
    "inspect": "what is in a checkpoint, who wrote it, and is it safe and whole",
    "rescue": "what is whole or can be mended of a damaged checkpoint",
    "retag": "change the device tags of a checkpoint in place: it loads anywhere",
    "run": "a Python program, unchanged, on the devices that are here",
    "verify": "whether every byte of a checkpoint is the one that was saved",
}
"""Each command and its line of help. Its module is of the same name in this package, and has

``add_arguments(parser)``, which declares its options and an ``epilog`` of examples, and ``run(arguments)``, which
returns the exit code, or a function that runs somebody's program and returns it.
"""
