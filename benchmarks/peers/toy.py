"""What the three systems train, and what a trial leaves behind: the same model, samples, faults and evidence for all.

Samples and dropout depend on the step and the data-parallel rank only, so that a system has nothing to restore besides parameters
and optimizer: its own loader and random states would only be more to lose. Of torch, only what a fork may inherit is touched at import.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hotswap.demo.loader import ExactlyOnceLoader, Microbatch
from hotswap.demo.model import GPT, GPTConfig
from hotswap.demo.samples import BatchShape

RANKS = 2
VICTIM = 1
ROWS, TOKENS, SEED = 4, 64, 1234
# Stands for the time in which a device computes and the host's cores are free: three processes share two cores here.
DEVICE_S = 0.02
DIRECTORY, FAULT, STEPS, FAULT_STEP = "PEERS_DIR", "PEERS_FAULT", "PEERS_STEPS", "PEERS_FAULT_STEP"
NODE, TUNED = "PEERS_NODE", "PEERS_TUNED"


class ScriptError(RuntimeError):
    """The exception that the script raises when that is the fault."""


def directory() -> Path:
    return Path(os.environ[DIRECTORY])


def steps_total() -> int:
    return int(os.environ[STEPS])


def tuned() -> bool:
    return os.environ[TUNED] == "1"


def build_model() -> GPT:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    return GPT(GPTConfig(tokens=TOKENS))


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Samples:
    """Microbatch of any step and rank."""

    def __init__(self) -> None:
        shape = BatchShape(dp_size=RANKS, microbatches=1, rows=ROWS, tokens=TOKENS)
        self._loaders = [ExactlyOnceLoader(shape, dp_rank=rank, seed=SEED) for rank in range(RANKS)]

    def of(self, step: int, rank: int) -> Microbatch:
        """Its samples; seeds dropout too."""
        torch.manual_seed(SEED + 1 + RANKS * step + rank)
        loader = self._loaders[rank]
        loader.position = step
        return loader.next_step()[0][0]


class Evidence:
    """Notes every completed step of this process, with the time."""

    def __init__(self) -> None:
        path = directory() / "records" / f"{os.getpid()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def completed(self, step: int, rank: int, **more: object) -> None:
        line = {"time": time.time(), "step": step, "rank": rank, "pid": os.getpid(), **more}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def final(self, rank: int, model: torch.nn.Module) -> None:
        """SHA-256 over all parameters, in their order."""
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().contiguous().numpy().tobytes())
        _write(directory() / f"final{rank}.json", {"time": time.time(), "parameters": digest.hexdigest()})


def device_time() -> None:
    time.sleep(DEVICE_S)


def strike(step: int, rank: int) -> None:
    """Between forward and backward: die, stop or raise, if it is this step and rank, once in a trial."""
    fault = os.environ.get(FAULT, "none")
    if fault == "none" or rank != VICTIM or step < int(os.environ[FAULT_STEP]):
        return
    if not (directory() / "go").exists():  # the spare is not ready yet
        return
    try:
        # Exclusive creation: a process that takes the victim's place passes unharmed.
        with (directory() / "struck.json").open("x") as file:
            json.dump({"time": time.time(), "step": step, "pid": os.getpid()}, file)
    except FileExistsError:
        return
    if fault == "exception":
        raise ScriptError(f"ordered in step {step}")
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if fault == "node":
        _kill_node()
    os.kill(os.getpid(), signal.SIGKILL)


def processes_with(name: str, value: str) -> list[int]:
    """Processes that were started with that environment variable, this one left out."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def _kill_node() -> None:
    """All processes of this node: launcher, monitors and all; hotswap makes each node a process group instead."""
    if NODE not in os.environ:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    for pid in processes_with(NODE, os.environ[NODE]):
        os.kill(pid, signal.SIGKILL)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all for a reader."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)
