"""What is tried: layouts, faults, and how a job has to come out of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotswap.chaos.cuts import Cut, host_names
from hotswap.demo import strikes
from hotswap.demo.options import Layout, TrainOptions
from hotswap.demo.plan import FRAMEWORKS, XID, Outside
from hotswap.demo.runner import JobSpec
from hotswap.diagnosis.model import Verdict
from hotswap.errors import EXIT_REQUEUE, EXIT_USER_ERROR, UsageError
from hotswap.session.faults import MOMENTS, Fault

STEP = 6
"""Of the fault: late enough for a spare to be built in most jobs, which none relies on."""
LONG_STEPS, LOAD_S = 60, 0.1
"""Of a job that goes on for some detection budgets, for there are cuts that do not stop it."""
SLOW_KBIT_PER_S, SLOW_STEPS = 4000, 8
"""Gradients of a step take several times as long as a step does otherwise."""
SPACES = "network namespaces: root, and the command ip"
_SMALL = TrainOptions(steps=10, eval_every=4, tokens=16, width=32, layers=2, rows=2, warmup=2)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training that takes seconds."""

    framework: str
    train: TrainOptions
    nodes: int

    @property
    def moments(self) -> tuple[str, ...]:
        """Of its step."""
        return FRAMEWORKS[self.framework].moments

    @property
    def width(self) -> int:
        """Workers of a node."""
        return self.train.layout.slots // self.nodes


_MEGATRON = replace(_SMALL, layout=Layout(tp=2, pp=2, dp=2), microbatches=2)
LAYOUTS = {
    "megatron-tp2-pp2-dp2": Program(framework="megatron", train=_MEGATRON, nodes=2),
    "megatron-bf16-overlap": Program(framework="megatron", train=replace(_MEGATRON, bf16=True, overlap=True), nodes=2),
    "fsdp2-dp4": Program(framework="fsdp2", train=replace(_SMALL, layout=Layout(dp=4)), nodes=2),
    "ddp-dp3": Program(framework="ddp", train=replace(_SMALL, layout=Layout(dp=3)), nodes=3),
}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the job itself has to say about what broke: the verdict, and its culprit among *slots* or *nodes* where they are given.

    ``must``: it has to be said; else it may be, where a second fault is answered by a recovery of its own.
    """

    verdict: Verdict
    slots: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    must: bool = True

    def fits(self, said: Mapping[str, Any]) -> bool:
        """Whether *said*, a ``diagnosed`` event, is this."""
        culprit = said["culprit"]
        named = (not self.slots or culprit.get("rank") in self.slots) and (
            not self.nodes or culprit.get("node") in self.nodes
        )
        return said["verdict"] == self.verdict.value and named

    def __str__(self) -> str:
        """For people: ``node_fault of node1``."""
        of = " or ".join([*(f"slot {slot}" for slot in self.slots), *self.nodes])
        return self.verdict.value + (f" of {of}" if of else "")


@dataclass(frozen=True, kw_only=True)
class Ordeal:
    """What happens to one job. ``exit_code``: 0, and then the job must be identical; else the documented stop.

    ``inside`` strikes at moments of steps, ``outside`` once a step is committed. ``checkpoints``: durable ones, every two steps.
    ``cuts``: what happens to the network between the nodes, each of which then has a host of its own, and ``steps`` and
    ``load_s``, if not 0, how many steps the job has and how long their data takes to come. ``harmless``: nothing has to be
    recovered, and nobody may be given up. ``kernel_logs``: each node has one of its own, to which a fault may write.
    ``truths``: the verdicts that are right; any other one is wrong.
    """

    inside: tuple[Fault, ...] = ()
    outside: tuple[Outside, ...] = ()
    cuts: tuple[Cut, ...] = ()
    steps: int = 0
    load_s: float = 0.0
    spares: int = 1
    exit_code: int = 0
    checkpoints: bool = False
    harmless: bool = False
    kernel_logs: bool = False
    arguments: tuple[str, ...] = ()
    truths: tuple[Truth, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A kind of fault. ``make`` gives None for a layout in which it makes no sense. ``needs``: what not every machine has."""

    what: str
    make: Callable[[Program], Ordeal | None]
    needs: str = ""


def _fault(program: Program, scope: str, moment: str, slot: int = 0, generation: int = 1) -> Fault:
    middle = program.train.microbatches // 2 if moment in ("forward", "backward") else 0
    return Fault(step=STEP, moment=moment, slot=slot, scope=scope, occurrence=middle, generation=generation)


def _process(program: Program, slot: int, *, must: bool = True) -> Truth:
    """The process of a slot broke; its node did not."""
    return Truth(verdict=Verdict.PROCESS_FAULT, slots=(slot,), nodes=(f"node{slot // program.width}",), must=must)


def _node(*numbers: int) -> Truth:
    return Truth(verdict=Verdict.NODE_FAULT, nodes=tuple(f"node{number}" for number in numbers))


def _of(program: Program, scope: str, slot: int) -> Truth:
    """What is right to say about a fault of *scope* on *slot*."""
    if scope == "raise":
        return Truth(verdict=Verdict.USER_ERROR, slots=(slot,))
    return _node(slot // program.width) if scope.endswith("node") else _process(program, slot)


def _at(scope: str, moment: str) -> Callable[[Program], Ordeal | None]:
    """The victim is in another place for every moment."""

    def make(program: Program) -> Ordeal | None:
        if moment not in program.moments:
            return None
        slot = MOMENTS.index(moment) % program.train.layout.slots
        return Ordeal(inside=(_fault(program, scope, moment, slot),), truths=(_of(program, scope, slot),))

    return make


def _outside(kind: str) -> Callable[[Program], Ordeal | None]:
    def make(program: Program) -> Ordeal:
        slot = program.train.layout.slots - 1
        outside = Outside(kind=kind, step=STEP // 2, slot=slot, node=f"node{slot // program.width}")
        truth = _process(program, slot) if kind.endswith("worker") else _node(slot // program.width)
        return Ordeal(outside=(outside,), truths=(truth,))

    return make


def _coordinator(program: Program) -> Ordeal:
    """Nothing else broke, and nothing else may be said to have."""
    return Ordeal(outside=(Outside(kind="coordinator", step=STEP // 2),), harmless=True)


def _gpu_lost(program: Program) -> Ordeal:
    """The node lives and could start a new worker; its kernel's log says that it had better not."""
    slot = program.train.layout.slots - 1
    node = slot // program.width
    outside = (
        Outside(kind=XID, step=STEP // 2, node=f"node{node}"),
        Outside(kind="abort-worker", step=STEP // 2, slot=slot),
    )
    return Ordeal(outside=outside, kernel_logs=True, truths=(_node(node),))


def _spare(program: Program) -> Ordeal:
    """And then a node, for which there is another."""
    outside = (Outside(kind="node", step=STEP // 2, node=f"node{program.nodes}"),)
    inside = (_fault(program, "node", "backward"),)
    return Ordeal(outside=outside, inside=inside, spares=2, truths=(_node(program.nodes), _node(0)))


def _coordinator_and_node(program: Program) -> Ordeal:
    """While there is none: the survivors wait for its successor."""
    outside = (Outside(kind="coordinator", step=STEP // 2),)
    return Ordeal(outside=outside, inside=(_fault(program, "node", "backward"),), truths=(_node(0),))


def _one_after_the_other(program: Program) -> Ordeal:
    """The node that has just taken a place, in the redone step."""
    first = _fault(program, "node", "backward")
    truth = _node(0, program.nodes, program.nodes + 1)
    return Ordeal(inside=(first, replace(first, generation=2)), spares=2, truths=(truth,))


def _survivor_in_the_redone_step(program: Program) -> Ordeal:
    other = program.width
    return Ordeal(
        inside=(_fault(program, "node", "backward"), _fault(program, "worker", "optimizer", other, generation=2)),
        spares=2,
        truths=(_node(0), _process(program, other, must=False)),
    )


def _owner_and_holder(program: Program) -> Ordeal:
    nodes = tuple(Outside(kind="node", step=STEP, node=f"node{index}") for index in (0, 1))
    return Ordeal(outside=nodes, spares=2, exit_code=EXIT_REQUEUE, truths=(_node(0, 1),))


def _owner_and_holder_after_a_checkpoint(program: Program) -> Ordeal:
    """Writing one takes longer than all steps of some of these jobs: one worker of a node that is to be lost keeps all waiting."""
    both = ("checkpoint_written", "death")
    nodes = tuple(Outside(kind="node", step=STEP, node=f"node{index}", after=both) for index in (0, 1))
    wait = _fault(program, "hang", "forward")
    return Ordeal(inside=(wait,), outside=nodes, spares=2, checkpoints=True, truths=(_node(0, 1),))


def _two_nodes(program: Program) -> Ordeal | None:
    """A node and a keeper of its replica, of which there is another one."""
    if program.nodes < 3:
        return None
    nodes = tuple(Outside(kind="node", step=STEP, node=f"node{index}") for index in (0, 1))
    return Ordeal(outside=nodes, spares=2, arguments=("--replicas", "2"), truths=(_node(0, 1),))


def _without_a_spare(program: Program) -> Ordeal:
    return Ordeal(
        inside=(_fault(program, "node", "backward"),),
        spares=0,
        exit_code=EXIT_REQUEUE,
        arguments=("--spare-wait-s", "1"),
        truths=(_node(0),),
    )


def _drain(program: Program, spares: int, exit_code: int, wait_s: str, *arguments: str) -> Ordeal:
    """The last node, soon: a spare that is not built by then takes the place all the same. Nothing is broken."""
    outside = (Outside(kind="drain", step=STEP // 2, node=f"node{program.nodes - 1}"),)
    flags = ("--drain-wait-s", wait_s, *arguments)
    return Ordeal(outside=outside, spares=spares, exit_code=exit_code, arguments=flags)


def _flipped(scope: str) -> Callable[[Program], Ordeal | None]:
    """Three that share state outvote one; two do not. With fully sharded state nobody has the same."""

    def make(program: Program) -> Ordeal | None:
        if program.framework == "fsdp2":
            return None
        code = 0 if program.train.layout.dp > 2 else EXIT_REQUEUE
        fault = _fault(program, scope, "backward", program.train.layout.slots - 1)
        node = (f"node{fault.slot // program.width}",) if code == 0 else ()
        truth = Truth(verdict=Verdict.NODE_FAULT, nodes=node)
        return Ordeal(inside=(fault,), exit_code=code, arguments=("--integrity-every", "1"), truths=(truth,))

    return make


LAST_S = 0.5
"""A quarter of the detection budget: what was sent meanwhile is sent again in time, although TCP waits longer every time."""


def _network(
    make: Callable[[Program, str, tuple[str, ...]], Ordeal],
    what: str,
    needs: str = SPACES,
    steps: int = LONG_STEPS,
    load_s: float = LOAD_S,
) -> Drill:
    """Of the last node that trains; *make* is told its name and those of all others, of which the last has the coordinator.

    On layouts of small processes: each host imports the framework for itself, and the network does not know what trains.
    """

    def made(program: Program) -> Ordeal | None:
        if program.framework == "megatron":
            return None
        *others, head = host_names(program.nodes, 1)
        node = others.pop()
        ordeal = make(program, node, (*others, head))
        return replace(ordeal, steps=steps, load_s=load_s)

    return Drill(what=what, make=made, needs=needs)


def _both(node: str, others: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for other in others for pair in ((node, other), (other, node)))


def _cut(kind: str, lost: Callable[[str, tuple[str, ...]], tuple[tuple[str, str], ...]]) -> Callable[..., Ordeal]:
    """The node is given up, and is said to have broken: whoever is not reached cannot say that it has not."""

    def make(program: Program, node: str, others: tuple[str, ...]) -> Ordeal:
        cut = Cut(kind=kind, node=node, step=STEP // 2, lost=lost(node, others))
        return Ordeal(cuts=(cut,), truths=(_node(program.nodes - 1),))

    return make


def _short_cut(program: Program, node: str, others: tuple[str, ...]) -> Ordeal:
    """Everybody waits, and nobody is given up."""
    cut = Cut(kind="short-cut", node=node, step=STEP // 2, lost=_both(node, others), lasts_s=LAST_S)
    return Ordeal(cuts=(cut,), harmless=True)


def _slow_link(program: Program, node: str, others: tuple[str, ...]) -> Ordeal:
    """Steps take longer, and nobody is given up. Snapshots may move apart, and need not: gradients take that link as well."""
    cut = Cut(kind="slow-link", node=node, step=STEP // 2, kbit_per_s=SLOW_KBIT_PER_S, lasts_steps=SLOW_STEPS)
    return Ordeal(cuts=(cut,), harmless=True, arguments=("--overhead-limit", "0.02"))


def _raised_everywhere(program: Program) -> Ordeal:
    faults = tuple(_fault(program, "raise", "optimizer", slot) for slot in range(program.train.layout.slots))
    return Ordeal(inside=faults, exit_code=EXIT_USER_ERROR, truths=(Truth(verdict=Verdict.USER_ERROR),))


DRILLS: dict[str, Drill] = {
    **{
        f"worker-{moment}": Drill(what=f"a worker is killed in '{moment}'", make=_at("worker", moment))
        for moment in MOMENTS
    },
    **{f"node-{moment}": Drill(what=f"a node is killed in '{moment}'", make=_at("node", moment)) for moment in MOMENTS},
    "stop-worker": Drill(what="a worker is stopped by a signal", make=_at("stop-worker", "backward")),
    "stop-node": Drill(what="a node falls silent", make=_at("stop-node", "backward")),
    "hang": Drill(what="a worker's main thread waits for ever", make=_at("hang", "backward")),
    "raise": Drill(what="the script fails on one slot, once", make=_at("raise", "optimizer")),
    "raise-everywhere": Drill(what="the script fails on all slots alike", make=_raised_everywhere),
    "flip-bit": Drill(
        what="a bit of a parameter flips in one slot, and states are compared", make=_flipped("flip-bit")
    ),
    "segv-worker": Drill(what="a worker crashes (SIGSEGV)", make=_outside("segv-worker")),
    "abort-worker": Drill(what="a worker aborts (SIGABRT)", make=_outside("abort-worker")),
    "gpu-lost": Drill(what="a worker aborts, and the kernel's log says that a GPU is gone (Xid 79)", make=_gpu_lost),
    "agent": Drill(what="an agent is killed", make=_outside("agent")),
    "coordinator": Drill(what="the coordinator is killed", make=_coordinator),
    "coordinator-then-node": Drill(what="the coordinator is killed, and then a node", make=_coordinator_and_node),
    "spare-then-node": Drill(what="a spare is killed, and then a node", make=_spare),
    "node-twice": Drill(what="the spare that took a place is killed in the redone step", make=_one_after_the_other),
    "node-then-survivor": Drill(what="a survivor is killed in the redone step", make=_survivor_in_the_redone_step),
    "owner-and-holder": Drill(what="a node and the one with its replicas are killed", make=_owner_and_holder),
    "owner-and-holder-checkpoint": Drill(
        what="the same, with durable checkpoints", make=_owner_and_holder_after_a_checkpoint
    ),
    "two-nodes": Drill(what="two nodes are killed at once, with two replicas", make=_two_nodes),
    "no-spare": Drill(what="a node is killed and there is no spare", make=_without_a_spare),
    "drain": Drill(what="a node is told to leave", make=lambda program: _drain(program, 1, 0, "0.2")),
    "drain-no-spare": Drill(
        what="the same, and there is no spare",
        make=lambda program: _drain(program, 0, EXIT_REQUEUE, "0", "--spare-wait-s", "1"),
    ),
    "cut-node": _network(
        _cut("cut-node", _both),
        "nobody reaches a node, and it reaches nobody",
        steps=0,  # All wait at once: as many as usual, if they last until the cut is made.
        load_s=2 * LOAD_S,
    ),
    "cut-to-coordinator": _network(
        _cut("cut-to-coordinator", lambda node, others: ((node, others[-1]),)),
        "what a node sends to the coordinator is lost; its peers reach it",
    ),
    "cut-from-coordinator": _network(
        _cut("cut-from-coordinator", lambda node, others: ((others[-1], node),)),
        "what the coordinator sends to a node is lost; its peers reach it",
    ),
    "cut-from-peers": _network(
        _cut("cut-from-peers", lambda node, others: _both(node, others[:-1])),
        "a node and those it trains with do not reach each other; the coordinator reaches all",
    ),
    "short-cut": _network(_short_cut, f"nobody reaches a node for {LAST_S:g} s; nobody may be given up"),
    "slow-link": _network(
        _slow_link,
        f"a node's link is narrowed to {SLOW_KBIT_PER_S // 1000} Mbit/s for {SLOW_STEPS} steps; nobody may be given up",
        needs=f"{SPACES} and tc",
    ),
}
FAST = (
    "worker-optimizer",
    "node-backward",
    "raise",
    "gpu-lost",
    "coordinator-then-node",
    "owner-and-holder-checkpoint",
    "no-spare",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job of the matrix."""

    layout: str
    drill: str
    ordeal: Ordeal

    @property
    def program(self) -> Program:
        """What it trains."""
        return LAYOUTS[self.layout]


def cells(suite: str, layouts: Sequence[str] = (), drills: Sequence[str] = ()) -> list[Cell]:
    """The cells of a suite, "fast" or "full": in "fast" each drill meets one layout. UsageError for names that there are not."""
    for given, known in ((layouts, LAYOUTS), (drills, DRILLS)):
        if unknown := [name for name in given if name not in known]:
            raise UsageError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [*(layouts or LAYOUTS)]
    found = []
    for row, name in enumerate(drills or (FAST if suite == "fast" else DRILLS)):
        columns = [chosen[row % len(chosen)]] if suite == "fast" else chosen
        for layout in columns:
            ordeal = DRILLS[name].make(LAYOUTS[layout])
            if ordeal is not None:
                found.append(Cell(layout=layout, drill=name, ordeal=ordeal))
    return found


def job_of(cell: Cell, directory: Path, timeout_s: float) -> JobSpec:
    """The job of *cell*, in *directory*."""
    arguments = cell.ordeal.arguments
    if cell.ordeal.kernel_logs:
        arguments += ("--kernel-log", str(strikes.kernel_log(directory / "job", "{node}")))
    if cell.ordeal.checkpoints:
        arguments += ("--checkpoint-dir", str(directory / "checkpoints"), "--checkpoint-interval", "2")
    train = cell.program.train
    return JobSpec(
        directory=directory,
        framework=cell.program.framework,
        train=replace(train, steps=cell.ordeal.steps or train.steps, load_s=cell.ordeal.load_s),
        nodes=cell.program.nodes,
        spares=cell.ordeal.spares,
        faults=cell.ordeal.inside,
        outside=cell.ordeal.outside,
        run_arguments=arguments,
        timeout_s=timeout_s,
    )
