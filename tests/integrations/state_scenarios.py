"""What each rank of a fleet does; results are JSON."""

from __future__ import annotations

import contextlib
import hashlib
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from state_fleet import FileRendezvous
from state_kept import KEPT, bucket_groups, checkpointing_flag, fsdp_contexts, fsdp_groups, fsdp_params, fsdp_states
from state_programs import Boom, TorchProgram, seed

from hotswap.comm import Groups
from hotswap.errors import UsageError
from hotswap.integrations import discover
from hotswap.integrations.base import local
from hotswap.replication.capture import Capture
from hotswap.replication.fingerprint import fingerprint


class Rank:
    """Groups of one rank and the generations it goes through."""

    def __init__(self, rank: int, world: int, rendezvous: FileRendezvous, timeout_s: float = 20.0) -> None:
        self.groups = Groups(slot=rank, world_size=world, timeout_s=timeout_s)
        self.groups.install()
        self._rendezvous = rendezvous
        self._generation = 0

    def connect(self) -> None:
        self._generation += 1
        self.groups.connect(self._generation, self._rendezvous)

    def detach(self) -> None:
        self.groups.detach()


def build(program: str, rank: int, world: int, start: int, **options: Any) -> Any:
    if program == "megatron":
        from state_megatron import MegatronProgram

        return MegatronProgram(rank, start, **options)
    return TorchProgram(program, rank, world, start, **options)


class Run:
    """A program and its capture."""

    def __init__(self, program: str, rank: int, world: int, start: int, **options: Any) -> None:
        self.program = build(program, rank, world, start, **options)
        self.slot = rank
        self.capture = Capture(discover(self.program.model, self.program.optimizer, **self.program.extras))
        self.snapshots: dict[int, tuple[bytearray, int, int]] = {}

    def snap(self, step: int) -> None:
        buffer = bytearray(self.capture.nbytes() + 512)
        self.snapshots[step] = (buffer, *self.capture.write(buffer, slot=self.slot, generation=1, step=step))

    def restore(self, snapshot: tuple[bytearray, int, int], step: int, *, heavy: bool) -> None:
        self.capture.read(*snapshot, slot=self.slot, step=step, heavy=heavy)

    def materialise(self) -> None:
        for adapter in self.capture.adapters:
            adapter.materialise()

    def reset(self) -> None:
        for adapter in self.capture.adapters:
            adapter.reset()


def swaps(
    rank: int,
    world: int,
    rendezvous: FileRendezvous,
    *,
    program: str,
    failures: list[dict[str, Any]],
    steps: int,
    heavy: bool = False,
    keep: str | None = None,
    timeout_s: float = 20.0,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run undisturbed; then again with failures, after each of which some ranks are replaced by fresh programs.

    A failure is {step, at, nth, victims, detached}. A failed attempt runs on detached groups, so that every rank can
    fail where it likes, as in a real abort; where no collective is under way it may as well run on connected ones.
    ``keep`` names a part of the survivors' state that reset is kept from resetting.
    """
    me = Rank(rank, world, rendezvous, timeout_s)
    undisturbed = Run(program, rank, world, 5, **(options or {}))
    run = Run(program, rank, world, 5, **(options or {}))
    me.connect()
    seed_again(5, rank)
    reference = trajectory(undisturbed, 0, steps)
    run.restore(undisturbed.snapshots[0], 0, heavy=True)
    run.materialise()
    digests: list[str] = []
    done, raised = 0, []
    for failure in failures:
        digests += trajectory(run, done, failure["step"])[:-1]
        done = failure["step"]
        if failure.get("detached", True):
            me.detach()
        raised.append(attempt_fails(run, failure["at"], failure.get("nth", 1)))
        me.detach()
        snapshot, is_victim = run.snapshots[done], rank in failure["victims"]
        if is_victim:
            run = Run(program, rank, world, 99, **(options or {}))
        reset_but(keep, run)
        me.connect()
        run.restore(snapshot, done, heavy=heavy or is_victim)
        run.materialise()
    digests += trajectory(run, done, steps)
    # Who leaves while a peer is still connecting looks to it like a dead one.
    me.groups.gate()
    last = run.snapshots[steps]
    return {
        "reference": reference,
        "digests": digests,
        "raised": raised,
        "peers": run.capture.peers(),
        "shared": hashlib.sha256(last[0][: last[1]]).hexdigest(),
        "shared_nbytes": last[1],
        "unique_nbytes": last[2],
        "shape": run.capture.adapters[0].shape(),
        "role": run.capture.adapters[0].role(),
        "compared": compared(run, rank),
    }


def compared(run: Run, rank: int) -> list[tuple[list[int], list[int]]]:
    """Who holds the same as this rank, and numbers of what that is."""
    return [
        (sorted((rank, *peers)), [int(fingerprint(entry.tensor)) for entry in entries])
        for peers, entries in run.capture.adapters[0].compared()
    ]


def seed_again(start: int, rank: int) -> None:
    seed(start + 17 * rank)


def trajectory(run: Run, begin: int, end: int) -> list[str]:
    """Digests at the boundaries ``begin`` to ``end``."""
    digests = []
    for step in range(begin, end + 1):
        run.snap(step)
        digests.append(run.capture.digest())
        if step < end:
            run.program.step()
    return digests


def attempt_fails(run: Run, at: str | None, nth: int) -> bool:
    if at is None:
        return False
    run.program.faults.arm(at, nth)
    with contextlib.suppress(Boom):
        run.program.step()
        return False
    return True


def reset_but(keep: str | None, run: Run) -> None:
    """Reset; then put back what survivors had in the part called ``keep``, as if reset had forgotten it."""
    put_back = KEPT[keep](run.program) if keep else lambda: None
    run.reset()
    put_back()


def ordinary(
    rank: int,
    world: int,
    rendezvous: FileRendezvous,
    *,
    program: str,
    steps: int,
    options: dict[str, Any] | None = None,
) -> list[str]:
    """Hashes of the parameters in a job that knows nothing of hotswap: ordinary groups, connected from the start."""
    store = dist.FileStore(f"{rendezvous.directory}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    built = build(program, rank, world, 5, **(options or {}))
    hashes = [parameter_hash(built)]
    for _ in range(steps):
        built.step()
        hashes.append(parameter_hash(built))
    dist.destroy_process_group()
    return hashes


def captured(
    rank: int,
    world: int,
    rendezvous: FileRendezvous,
    *,
    program: str,
    steps: int,
    options: dict[str, Any] | None = None,
) -> list[str]:
    """The same with stable groups, connected after everything is built, and a snapshot at every boundary."""
    me = Rank(rank, world, rendezvous)
    run = Run(program, rank, world, 5, **(options or {}))
    me.connect()
    for adapter in run.capture.adapters:
        adapter.synchronise()
        adapter.materialise()
    hashes = [parameter_hash(run.program)]
    for step in range(steps):
        run.snap(step)
        run.program.step()
        hashes.append(parameter_hash(run.program))
    return hashes


def parameter_hash(program: Any) -> str:
    total = hashlib.sha256()
    for _, parameter in named_parameters(program):
        total.update(local(parameter).detach().reshape(-1).contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


def residue(
    rank: int,
    world: int,
    rendezvous: FileRendezvous,
    *,
    program: str,
    at: str,
    nth: int,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The framework's runtime state: as it ought to be, as a failed attempt leaves it, and after reset and restore."""
    me = Rank(rank, world, rendezvous)
    healthy = Run(program, rank, world, 5, **(options or {}))
    run = Run(program, rank, world, 5, **(options or {}))
    me.connect()
    trajectory(run, 0, 1)
    if program != "megatron":  # Megatron goes back to how it was built, FSDP2 to how it is between steps.
        trajectory(healthy, 0, 1)
    clean = runtime_state(healthy)
    me.detach()
    assert attempt_fails(run, at, nth)
    before = runtime_state(run)
    run.reset()
    run.restore(run.snapshots[1], 1, heavy=False)
    left = [name for name, parameter in named_parameters(run.program) if parameter.grad is not None]
    return {"clean": clean, "before": before, "after": runtime_state(run), "gradients": left}


def named_parameters(program: Any) -> list[tuple[str, torch.nn.Parameter]]:
    model = program.model
    return [pair for chunk in (model if isinstance(model, list) else [model]) for pair in chunk.named_parameters()]


def runtime_state(run: Run) -> dict[str, str]:
    """Plain fields, and how full the containers are, of the framework's objects for one step."""
    if run.program.extras.get("position") is run.program:
        owners = {"group": bucket_groups(run.program), "module": [checkpointing_flag(run.program)[0]]}
        sums = [float(b.grad_data.abs().sum()) != 0.0 for chunk in run.program.model for b in chunk.buffers]
    else:
        owners = {
            "state": fsdp_states(run.program),
            "context": fsdp_contexts(run.program),
            "comm": list({id(s._comm_ctx): s._comm_ctx for s in fsdp_states(run.program)}.values()),
            "group": fsdp_groups(run.program),
            "param": fsdp_params(run.program),
        }
        sums = []
    found = {"gradients in buffers": repr(sums)}
    for kind, items in owners.items():
        for index, item in enumerate(items):
            for name, value in vars(item).items():
                found[f"{kind} {index} {name}"] = described(value)
    return {name: text for name, text in found.items() if text}


def described(value: Any) -> str:
    if value is None or isinstance(value, bool | Enum):
        return repr(value)
    if isinstance(value, dict | list | set | tuple):
        return f"{len(value)} items"
    return "there" if type(value).__module__.startswith(("torch", "state")) else ""


def started(
    rank: int, world: int, rendezvous: FileRendezvous, *, program: str, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Built from another seed on every rank; then what session does at the very first start."""
    me = Rank(rank, world, rendezvous)
    run = Run(program, rank, world, 5 + rank, **(options or {}))
    me.connect()
    for adapter in run.capture.adapters:
        adapter.synchronise()
        adapter.materialise()
    run.snap(0)
    buffer, shared_nbytes, _ = run.snapshots[0]
    model = run.program.model if isinstance(run.program.model, list) else [run.program.model]
    parameters = [p for chunk in model for p in chunk.parameters()]
    return {
        "peers": run.capture.peers(),
        "shared": hashlib.sha256(buffer[:shared_nbytes]).hexdigest(),
        "parameters": [hashlib.sha256(p.detach().float().numpy()).hexdigest() for p in parameters],
    }


def refused(rank: int, world: int, rendezvous: FileRendezvous, *, program: str, change: list[Any]) -> str:
    """The error for a program with one setting changed after it was built."""
    Rank(rank, world, rendezvous)
    run = Run(program, rank, world, 5)
    owner: Any = run.program
    *path, name, value = change
    for step in path:
        owner = owner[step] if isinstance(step, int) else getattr(owner, step)
    setattr(owner, name, value)
    try:
        discover(run.program.model, run.program.optimizer)
    except UsageError as error:
        return str(error)
    return ""
