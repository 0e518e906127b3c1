"""``python -m transload``, for when the script of that name belongs to another environment."""

import sys

from transload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
