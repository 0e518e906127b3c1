"""The command line: a static table of commands. Only the module of the requested command is imported."""

COMMANDS: dict[str, str] = {
    "check": "whether a checkpoint loads here, and what torch.load would say",
    "convert": "convert to safetensors, torch zip, npz or raw, without torch",
    "doctor": "why CUDA is unavailable: the cause, the evidence and the fix",
    "explain": "what an error message means, and how to fix it",
    "inspect": "what a checkpoint contains, and whether it is safe and complete",
    "rescue": "recover what is left of a damaged checkpoint",
    "retag": "change device tags in place, so that torch.load works anywhere",
    "run": "run a Python program unchanged on the devices of this machine",
    "verify": "check that every byte of a checkpoint is the one that was saved",
}
"""Each command and its line of help. ``help.md`` has the examples and the exit codes that the help shows.

Commands are in ``files``, ``doctor``, ``main`` and ``commands``: ``add_options(command, option)`` declares the options
of a command, and ``run_x(arguments)`` returns the exit code of the command ``x``, or a function that runs a program and
returns its exit code.
"""
