"""What a demonstration does: which job, what is killed, when and where."""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hotswap.demo.options import Layout, TrainOptions
from hotswap.errors import UsageError
from hotswap.session.faults import MOMENTS, Fault

XID = "xid"
"""Not a strike: the kernel's log of a node says that a GPU is gone."""
KILLS = ("none", "worker", "node", "spare", "coordinator")


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One of the training programs. ``moments``: those that come up in its step."""

    title: str
    script: str
    defaults: TrainOptions
    nodes: int
    moments: tuple[str, ...] = MOMENTS

    @property
    def module(self) -> str:
        """Imported once for all workers."""
        return f"hotswap.demo.{Path(self.script).stem}"


FRAMEWORKS = {
    "megatron": Framework(
        title="Megatron-Core GPT with distributed optimizer",
        script="train_megatron.py",
        defaults=TrainOptions(layout=Layout(tp=2, pp=2, dp=2), microbatches=4, rows=2, layers=2, width=64),
        nodes=2,
    ),
    "fsdp2": Framework(
        title="GPT with FSDP2", script="train_fsdp2.py", defaults=TrainOptions(layout=Layout(dp=4)), nodes=2
    ),
    "ddp": Framework(
        title="GPT with DistributedDataParallel",
        script="train_ddp.py",
        defaults=TrainOptions(layout=Layout(dp=3)),
        nodes=3,
        moments=tuple(moment for moment in MOMENTS if moment != "gather"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outside:
    """A fault from outside the job once *step* is committed; *kind* is one of ``drills.DRILLS``, or XID.

    *after*: what must have been noticed as well, by its ``event``: of the job's log, or "death" for a fault from inside.
    """

    kind: str
    step: int
    node: str = ""
    slot: int = -1
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One demonstration. ``kill`` is one of KILLS; *moment* and *slot* say where a worker or node dies."""

    framework: str = "megatron"
    train: TrainOptions = FRAMEWORKS["megatron"].defaults
    nodes: int = 2
    spares: int = 1
    kill: str = "node"
    moment: str = "backward"
    slot: int = 0
    step: int = 10
    seed: int = 1234

    @property
    def width(self) -> int:
        """Workers per node."""
        return self.train.layout.slots // self.nodes

    @property
    def victim_node(self) -> str:
        """Name of the node that has the victim's slot, or of the spare that dies."""
        return f"node{self.nodes if self.kill == 'spare' else self.slot // self.width}"

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Deaths from inside."""
        if self.kill not in ("worker", "node"):
            return ()
        middle = self.train.microbatches // 2 if self.moment in ("forward", "backward") else 0
        return (Fault(step=self.step, moment=self.moment, slot=self.slot, scope=self.kill, occurrence=middle),)

    @property
    def outside(self) -> tuple[Outside, ...]:
        """Deaths from outside."""
        if self.kill not in ("spare", "coordinator"):
            return ()
        return (Outside(kind=self.kill, step=self.step, node=self.victim_node if self.kill == "spare" else ""),)

    def describe(self) -> dict[str, object]:
        """For the JSON report."""
        inside = self.kill in ("worker", "node")
        return {
            "framework": self.framework,
            "layout": str(self.train.layout),
            "nodes": self.nodes,
            "spares": self.spares,
            "steps": self.train.steps,
            "seed": self.seed,
            "kill": self.kill,
            "at": self.moment if inside else None,
            "step": self.step if self.kill != "none" else None,
            "slot": self.slot if inside else None,
            "node": self.victim_node if self.kill in ("node", "spare") else None,
            "train": {**asdict(self.train), "layout": str(self.train.layout), "out": ""},
        }


def parser() -> argparse.ArgumentParser:
    """Options of ``hotswap demo``."""
    made = argparse.ArgumentParser(
        prog="hotswap demo",
        description="Train twice, once undisturbed and once with a death in the middle of a step, and compare bit for bit.",
        allow_abbrev=False,
    )
    made.add_argument("--kill", choices=KILLS, default="node", help="what dies (default: node)")
    made.add_argument(
        "--victim", default="", metavar="SLOT|NODE", help="a worker's slot, or a node's name or number (default: drawn)"
    )
    made.add_argument(
        "--at", choices=(*MOMENTS, "random"), default="random", help="moment of the step (default: drawn)"
    )
    made.add_argument("--step", type=int, help="step in which it dies (default: just after the middle)")
    made.add_argument("--steps", type=int, default=40, help="training steps (default: 40)")
    made.add_argument(
        "--layout", help="mesh, like tp2,pp2,dp2 (default: tp2,pp2,dp2 for megatron, dp4 for fsdp2, dp3 for ddp)"
    )
    made.add_argument("--framework", choices=tuple(FRAMEWORKS), default="megatron")
    made.add_argument("--seed", type=int, default=1234, help="of the training, and of what is drawn here")
    made.add_argument("--nodes", type=int, help="active nodes (default: 2, for ddp 3)")
    made.add_argument("--spares", type=int, default=1, help="spare nodes (default: 1)")
    made.add_argument("--bf16", action="store_true", help="bfloat16 (megatron only)")
    made.add_argument("--overlap", action="store_true", help="overlap communication with computation (megatron only)")
    made.add_argument(
        "--keep", default="", metavar="DIR", help="keep logs and evidence here, and reuse a reference run found here"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan for parsed options; draws what was left open. UsageError for what cannot work."""
    framework = FRAMEWORKS[args.framework]
    layout = Layout.parse(args.layout) if args.layout else framework.defaults.layout
    nodes = args.nodes or framework.nodes
    _require_fitting(args, layout, nodes)
    draw = random.Random(args.seed)
    moment = draw.choice(framework.moments) if args.at == "random" else args.at
    if moment not in framework.moments:
        raise UsageError(
            f"--at {moment}: a step of {args.framework} has no such moment; it has {', '.join(framework.moments)}"
        )
    step = _step(args)
    train = replace(
        framework.defaults, layout=layout, steps=args.steps, seed=args.seed, bf16=args.bf16, overlap=args.overlap
    )
    plan = Plan(
        framework=args.framework,
        train=train,
        nodes=nodes,
        spares=args.spares,
        kill=args.kill,
        moment=moment,
        slot=draw.randrange(layout.slots),
        step=step,
        seed=args.seed,
    )
    return replace(plan, slot=_victim(args, plan, draw)) if args.victim else plan


def _step(args: argparse.Namespace) -> int:
    """Late enough for the spare to be ready, and not a step that begins with an evaluation."""
    return min(args.steps // 2 + 1, args.steps - 1) if args.step is None else int(args.step)


def _require_fitting(args: argparse.Namespace, layout: Layout, nodes: int) -> None:
    if nodes < 1 or layout.slots % nodes:
        raise UsageError(
            f"layout {layout} has {layout.slots} slots, which {nodes} nodes cannot share equally: choose other --nodes"
        )
    if args.framework != "megatron" and (layout.tp > 1 or layout.pp > 1):
        raise UsageError(f"--framework {args.framework} has only the axis dp")
    if args.framework != "megatron" and (args.bf16 or args.overlap):
        raise UsageError("--bf16 and --overlap are for --framework megatron")
    step = _step(args)
    if args.steps < 2 or not 0 <= step < args.steps:
        raise UsageError(f"--step {step}: the steps of this run are 0 to {args.steps - 1}")
    if args.spares < 0 or (args.spares < 1 and args.kill in ("node", "spare")):
        raise UsageError(f"--kill {args.kill} needs a spare: --spares 1 or more")
    if nodes == 1 and args.kill == "node":
        raise UsageError("--kill node with --nodes 1 leaves nobody who holds a replica: use 2 nodes or more")


def _victim(args: argparse.Namespace, plan: Plan, draw: random.Random) -> int:
    match = re.fullmatch(r"(node)?(\d+)", args.victim)
    if match is None or args.kill not in ("worker", "node"):
        raise UsageError(
            f"--victim {args.victim}: give a slot with --kill worker, a node's name or number with --kill node"
        )
    number = int(match[2])
    if args.kill == "node" or match[1]:
        if number >= plan.nodes:
            raise UsageError(f"--victim {args.victim}: the active nodes are node0 to node{plan.nodes - 1}")
        return number * plan.width + draw.randrange(plan.width)
    if number >= plan.train.layout.slots:
        raise UsageError(f"--victim {args.victim}: the slots are 0 to {plan.train.layout.slots - 1}")
    return number
