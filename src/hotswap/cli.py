"""The command line. Starts at once: torch is imported only by the subcommands that need it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hotswap import __version__
from hotswap.errors import (
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USAGE,
    EXIT_USER_ERROR,
    HotswapError,
    RecoveryImpossible,
    UsageError,
)

EXIT_INTERRUPTED = 130
USAGE = """usage: hotswap <command> [options]

commands:
  run       run a training script; takes torchrun's flags (hotswap run --help)
  demo      a real training loses a node, a spare takes its place, the result is identical (hotswap demo --help)
  classify  what broke: reads logs, names cause, culprit and action (hotswap classify --help)
  report    what a job lost, why, and what it cost (hotswap report LOGDIR)
  drain     let a node leave a running job: a spare takes its place first (hotswap drain LOGDIR NODE)
  coordinator
            decide for a job on a host of its own, alone or as one of several (hotswap coordinator --help)
  store     where several coordinators agree on which one leads, without etcd (hotswap store --help)
  doctor    can hotswap work here, and which deadlines would a job have (hotswap doctor --help)
  plan      what a job's protection takes in memory and network, and which losses it survives (hotswap plan --help)
  chaos     small real trainings lose something, each in another way: a table of how they came out (hotswap chaos --help)
  inject    strike a running job that allows it, for drills (hotswap inject LOGDIR FAULT)
  probe     is this node healthy: quick checks of GPUs, memory, disk, clock (hotswap probe --help)
  simulate  jobs with faults in virtual time, checked against every promise (hotswap simulate --help)

  --version, --help
"""


def _run(argv: list[str]) -> int:
    from hotswap.launch.job import main

    return main(argv)


def _demo(argv: list[str]) -> int:
    try:
        from hotswap.demo.cli import main
    except ModuleNotFoundError as error:
        raise UsageError(f"the demo needs {error.name}: pip install 'hotswap[demo,megatron]'") from None
    return main(argv)


def _chaos(argv: list[str]) -> int:
    try:
        from hotswap.chaos.cli import main
    except ModuleNotFoundError as error:
        raise UsageError(f"this needs {error.name}: pip install 'hotswap[demo,megatron]'") from None
    return main(argv)


def _inject(argv: list[str]) -> int:
    from hotswap.launch.inject import main

    return main(argv)


def _classify(argv: list[str]) -> int:
    from hotswap.diagnosis.cli import main

    return main(argv)


def _report(argv: list[str]) -> int:
    from hotswap.observability.report import main

    return main(argv)


def _simulate(argv: list[str]) -> int:
    from hotswap.sim.cli import main

    return main(argv)


def _probe(argv: list[str]) -> int:
    from hotswap.diagnosis.probes.cli import main

    return main(argv)


def _drain(argv: list[str]) -> int:
    from hotswap.launch.drain import main

    return main(argv)


def _doctor(argv: list[str]) -> int:
    from hotswap.launch.doctor import main

    return main(argv)


def _plan(argv: list[str]) -> int:
    from hotswap.planning.cli import main

    return main(argv)


def _coordinator(argv: list[str]) -> int:
    from hotswap.launch.control_plane import coordinator

    return coordinator(argv)


def _store(argv: list[str]) -> int:
    from hotswap.launch.control_plane import store

    return store(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "demo": _demo,
    "classify": _classify,
    "report": _report,
    "drain": _drain,
    "coordinator": _coordinator,
    "store": _store,
    "doctor": _doctor,
    "plan": _plan,
    "probe": _probe,
    "simulate": _simulate,
    "chaos": _chaos,
    "inject": _inject,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``hotswap``; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] == "--version":
        print(f"hotswap {__version__}")
        return EXIT_OK
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"hotswap: there is no command {arguments[0]!r}\n\n{USAGE}", end="", file=sys.stderr)
        return EXIT_USAGE
    return _guarded(command, arguments[1:])


def _guarded(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        return command(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except HotswapError as error:
        print(f"hotswap: {error}", file=sys.stderr)
        if isinstance(error, UsageError):
            return EXIT_USAGE
        return EXIT_REQUEUE if isinstance(error, RecoveryImpossible) else EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
