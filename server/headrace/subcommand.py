"""The words of a small command, told apart by argparse; what is wrong with them is said as the other commands say it."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class WordParser(argparse.ArgumentParser):
    """The parser of one command; exits with status 1 for a mistake."""

    def __init__(self, name: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=name,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit."""
        self.print_usage(sys.stderr)
        self.exit(1, f"  {message}\n")
