"""``hotswap demo``: train twice, once with a death in the middle of a step, and compare to the last bit."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import hotswap
from hotswap.demo import corpus, report
from hotswap.demo.plan import FRAMEWORKS, Plan, parser, plan_of
from hotswap.demo.runner import JobSpec, explain_failure, run_job
from hotswap.demo.screen import Screen
from hotswap.demo.verdict import Evidence, gather
from hotswap.demo.view import JobView
from hotswap.errors import EXIT_OK, EXIT_USER_ERROR, HotswapError, UsageError


def main(argv: Sequence[str]) -> int:
    """Run the demonstration; 0 if the job recovered and is identical, 1 if not, 2 for wrong options, 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    plan = plan_of(args)
    _require_installed(plan)
    screen = Screen(silent=args.json)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _directory(args.keep) as directory:
            return _demonstrate(plan, directory, screen, as_json=args.json)
    except KeyboardInterrupt:
        print("hotswap: interrupted, every process of the demonstration was ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, previous)


def _require_installed(plan: Plan) -> None:
    if plan.framework == "megatron" and find_spec("megatron") is None:
        raise UsageError(
            "the default demonstration needs Megatron-Core: pip install megatron-core, or use --framework fsdp2"
        )


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _directory(keep: str) -> Iterator[Path]:
    """Where both runs leave their evidence; kept if asked for, or if something went wrong."""
    if keep:
        path = Path(keep).resolve()
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="hotswap-demo-"))
    try:
        yield path
    except HotswapError:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _demonstrate(plan: Plan, directory: Path, screen: Screen, *, as_json: bool) -> int:
    screen.say(_headline(plan))
    reference = _reference(plan, directory, screen)
    spec = JobSpec(
        directory=_next_directory(directory),
        framework=plan.framework,
        train=plan.train,
        nodes=plan.nodes,
        spares=plan.spares,
        faults=plan.faults,
        outside=plan.outside,
    )
    outcome = report.judge(plan, reference, _run(spec, f"2 of 2: {_announced(plan)}", screen))
    if as_json:
        print(json.dumps(report.as_json(outcome)))
    else:
        screen.say(report.for_people(outcome))
    return EXIT_OK if outcome.identical and outcome.complaint is None else EXIT_USER_ERROR


def _headline(plan: Plan) -> str:
    framework = FRAMEWORKS[plan.framework]
    spares = f" + {plan.spares} spare{'s' if plan.spares > 1 else ''}" if plan.spares else ""
    return f"{framework.title}, {plan.train.layout}: {plan.train.layout.slots} workers on {plan.nodes} nodes{spares}, {plan.train.steps} steps\n"


def _announced(plan: Plan) -> str:
    if plan.kill == "none":
        return "nothing dies"
    if plan.outside:
        return f"the {plan.kill} dies once step {plan.step} is committed"
    what = f"{plan.victim_node}" if plan.kill == "node" else f"the worker of slot {plan.slot}"
    return f"{what} dies in {plan.moment} of step {plan.step}"


def _reference(plan: Plan, directory: Path, screen: Screen) -> Evidence:
    """The undisturbed run: an earlier one of the same program with the same settings, or a new one."""
    spec = JobSpec(
        directory=directory / f"reference-{_key(plan)}",
        framework=plan.framework,
        train=plan.train,
        nodes=plan.nodes,
        spares=0,
    )
    done = spec.directory / "done"
    if done.exists():
        screen.say(f"1 of 2: undisturbed, taken from {spec.directory}")
        return _evidence(spec, EXIT_OK)
    shutil.rmtree(spec.directory, ignore_errors=True)
    evidence = _run(spec, "1 of 2: undisturbed", screen)
    done.touch()
    return evidence


def _key(plan: Plan) -> str:
    """Equal keys: equal program, text, settings and versions, so equal losses."""
    sources = hashlib.sha256()
    for path in sorted(Path(hotswap.__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    settings: dict[str, Any] = {
        "framework": plan.framework,
        "train": {**asdict(plan.train), "layout": str(plan.train.layout)},
        "nodes": plan.nodes,
        "text": corpus.load().fingerprint(),
        "versions": report.versions(),
        "sources": sources.hexdigest(),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _next_directory(directory: Path) -> Path:
    taken = [int(path.name.removeprefix("run-")) for path in directory.glob("run-*")]
    return directory / f"run-{max(taken, default=0) + 1}"


def _run(spec: JobSpec, title: str, screen: Screen) -> Evidence:
    """Run one job to its end. HotswapError with the reason and the tail of the log if it fails."""
    view = JobView(steps=spec.train.steps, ranks=spec.train.layout.dp)
    try:
        with screen.job(title, view) as notice:
            code = run_job(spec, notice)
    except TimeoutError as error:
        raise HotswapError(str(error)) from None
    evidence = _evidence(spec, code)
    if code:
        raise HotswapError(
            f"the training job ended with {code}: {explain_failure(spec, evidence.events)}\nlogs in {spec.directory}"
        )
    return evidence


def _evidence(spec: JobSpec, code: int) -> Evidence:
    return gather(spec.directory, spec.logs / "events.jsonl", spec.fault_log, spec.train, code)
