"""The command line. Starts at once: torch is imported only by the subcommands that need it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hotswap import __version__
from hotswap.errors import EXIT_USAGE, HotswapError, RecoveryImpossible, UsageError

USAGE = """usage: hotswap <command> [options]

commands:
  run      run a training script; takes torchrun's flags (hotswap run --help)
  demo     a real training loses a node, a spare takes its place, the result is identical (hotswap demo --help)

  --version, --help
"""


def _run(argv: list[str]) -> int:
    from hotswap.launch.job import main

    return main(argv)


def _demo(argv: list[str]) -> int:
    try:
        from hotswap.demo.cli import main
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: pip install 'hotswap[demo]' megatron-core") from None
    return main(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {"run": _run, "demo": _demo}


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``hotswap``; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"hotswap {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"hotswap: there is no command {arguments[0]!r}\n\n{USAGE}", end="", file=sys.stderr)
        return EXIT_USAGE
    try:
        return command(arguments[1:])
    except UsageError as error:
        print(f"hotswap: {error}", file=sys.stderr)
        return EXIT_USAGE
    except HotswapError as error:
        print(f"hotswap: {error}", file=sys.stderr)
        return 75 if isinstance(error, RecoveryImpossible) else 1


if __name__ == "__main__":
    sys.exit(main())
