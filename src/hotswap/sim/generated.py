"""Files that are drawn from the code that they describe: bring one up to date, or say that it is not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hotswap.errors import EXIT_OK, EXIT_USER_ERROR


def keep(
    module: str, description: str | None, default: Path, draw: Callable[[str], str], argv: list[str] | None
) -> int:
    """The command line of *module*: exit code 0 if the file is up to date, or now is.

    *draw* gives the file's text from the one that it has, which is empty if there is no file.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("file", nargs="?", type=Path, default=default)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(argv)
    text = options.file.read_text() if options.file.exists() else ""
    drawn = draw(text)
    if drawn == text:
        return EXIT_OK
    if options.check:
        print(f"{options.file} is not up to date: run make docs", file=sys.stderr)
        return EXIT_USER_ERROR
    options.file.write_text(drawn)
    print(f"{options.file} written")
    return EXIT_OK
