"""A model (one module, or the chunks of a pipeline stage) together with its optimizers: common to all frameworks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hotswap.errors import LayoutMismatch, UsageError
from hotswap.integrations.base import AdapterBase, TensorEntry, TensorSpec, local, place_of
from hotswap.integrations.optim import OptimizerState


class ModuleAdapter(AdapterBase):
    """An unwrapped module: everything is unique to its slot. Frameworks refine who has what."""

    def __init__(self, chunks: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """``optimizers`` are torch optimizers, unwrapped."""
        super().__init__("model")
        self.chunks = list(chunks)
        self._states = [OptimizerState(opt, f"optimizer.{index}") for index, opt in enumerate(optimizers)]
        self._modules = [module for chunk in self.chunks for module in chunk.modules()]
        self._tables: list[dict[str, Any]] = []
        for module in self._modules:
            self._tables += [module._parameters, module._buffers, module._modules]
        self._with_extra = dict(self._modules_with_extra())
        self._peers: tuple[int, ...] | None = None

    # --- what a framework refines ---------------------------------------------------------------------------------

    def _parameters(self, chunk: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        return chunk.named_parameters()

    def _derived(self) -> set[int]:
        """Ids of parameters that `materialise` rebuilds from others, so that they need no copy."""
        return set()

    def _holders(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Other slots that hold exactly these bytes."""
        return ()

    # --- tensors --------------------------------------------------------------------------------------------------

    def tensors(self) -> list[TensorEntry]:
        """Parameters outside of the optimizers, buffers, then each optimizer's parameters and state."""
        entries = list(self._module_entries())
        for state in self._states:
            entries += state.entries(self._is_shared)
        for entry in entries:
            if torch._debug_has_internal_overlap(entry.tensor) == 1:
                raise UsageError(
                    f"{entry.name} is an expanded view and cannot be restored in place: make it contiguous"
                )
        return entries

    def _module_entries(self) -> Iterator[TensorEntry]:
        seen = {id(parameter) for _, parameter in self._optimized()} | self._derived()
        for index, chunk in enumerate(self.chunks):
            for name, parameter in self._parameters(chunk):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield TensorEntry(
                        name=f"model.{index}.{name}",
                        tensor=local(parameter),
                        shared=self._is_shared(parameter),
                        is_dtensor=isinstance(parameter, DTensor),
                        place=place_of(parameter),
                    )
            for name, buffer in chunk.named_buffers():
                # Batch-norm statistics and the like: each slot has its own, and forward changes them.
                yield TensorEntry(
                    name=f"buffer.{index}.{name}",
                    tensor=local(buffer),
                    volatile=True,
                    is_dtensor=isinstance(buffer, DTensor),
                    place=place_of(buffer),
                )

    def _optimized(self) -> Iterator[tuple[str, torch.Tensor]]:
        return chain.from_iterable(state.parameters() for state in self._states)

    def _is_shared(self, parameter: torch.Tensor) -> bool:
        peers = self.peers()
        return bool(peers) and set(peers) <= set(self._holders(parameter))

    def fingerprint(self) -> object:
        """Identities of everything in the modules' tables and in the optimizers."""
        members = list(map(id, chain.from_iterable(map(dict.values, self._tables))))
        return members, [state.fingerprint() for state in self._states]

    def check(self, wanted: Mapping[str, TensorSpec]) -> None:
        """What the optimizers cannot make must be here already, in the same form."""
        for state in self._states:
            state.check(wanted)
        fixed = {entry.name: entry.spec() for entry in self.tensors() if ".state." not in entry.name}
        expected = {name: spec for name, spec in wanted.items() if name in fixed or not _is_state(name)}
        for name in sorted(fixed.keys() ^ expected.keys()):
            where = "this process but not in the snapshot" if name in fixed else "the snapshot but not in this process"
            raise LayoutMismatch(f"{name} is in {where}: they are not of the same program")
        for name, spec in fixed.items():
            if (spec.dtype, spec.shape) != (expected[name].dtype, expected[name].shape):
                raise LayoutMismatch(
                    f"{name} is {spec.dtype} {spec.shape} here and {expected[name].dtype} {expected[name].shape} in the "
                    "snapshot: they are not of the same program"
                )

    def arrange(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Make and drop optimizer state."""
        for state in self._states:
            state.arrange(wanted)

    # --- objects --------------------------------------------------------------------------------------------------

    def objects(self) -> dict[str, Any]:
        """Optimizer settings, extra state of modules, and which modules are in training mode."""
        return {
            "optimizers": [state.objects() for state in self._states],
            "extra": dict(self._extra_states()),
            # An evaluation that is cut short by a peer's loss leaves the model in evaluation mode.
            "modes": bytes(module.training for module in self._modules),
        }

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Put them back."""
        for state, saved in zip(self._states, tree["optimizers"], strict=True):
            state.load_objects(saved)
        for module, training in zip(self._modules, tree["modes"], strict=True):
            module.training = bool(training)
        for name, saved in tree["extra"].items():
            self._with_extra[name].set_extra_state(saved)

    def _extra_states(self) -> Iterator[tuple[str, Any]]:
        for name, module in self._with_extra.items():
            saved = module.get_extra_state()
            if saved is not None:
                yield name, saved

    def _modules_with_extra(self) -> Iterator[tuple[str, nn.Module]]:
        for index, chunk in enumerate(self.chunks):
            for name, module in chunk.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield f"{index}.{name}", module

    # --- the rest -------------------------------------------------------------------------------------------------

    def peers(self) -> tuple[int, ...]:
        """The set of holders that covers the most bytes; other tensors count as unique."""
        if self._peers is None:
            self._peers = _best_peers([(self._holders(p), local(p).nbytes) for _, p in self._all_parameters()])
        return self._peers

    def compared(self) -> list[tuple[tuple[int, ...], list[TensorEntry]]]:
        """What peers restore from each other."""
        shared = [entry for entry in self.tensors() if entry.shared]
        return [(self.peers(), shared)] if shared else []

    def _all_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        derived = self._derived()
        for chunk in self.chunks:
            yield from ((name, p) for name, p in self._parameters(chunk) if id(p) not in derived)
        yield from self._optimized()

    def reset(self) -> None:
        """Drop gradients. What an unfinished collective left in c10d is for the process groups' owner to clear."""
        for _, parameter in chain(self._optimized(), *(chunk.named_parameters() for chunk in self.chunks)):
            parameter.grad = None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The inner optimizers."""
        return [state.optimizer for state in self._states]

    def shape(self) -> str:
        """Hash over parameters and buffers, their place in the mesh included."""
        rows = [(e.name, str(e.tensor.dtype), tuple(e.tensor.shape)) for e in self.tensors() if ".state." not in e.name]
        kinds = [f"{type(o).__module__}.{type(o).__qualname__}" for o in self.optimizers()]
        return hashlib.sha256(repr((type(self).__name__, rows, kinds, self._place())).encode()).hexdigest()

    def role(self) -> str:
        """Hash over the parameters as they are in the whole, and the place in the mesh but for the data-parallel axes."""
        rows = [(name, str(p.dtype), tuple(p.shape)) for chunk in self.chunks for name, p in self._parameters(chunk)]
        return hashlib.sha256(repr((type(self).__name__, rows, self._part())).encode()).hexdigest()

    def obstacle(self) -> str | None:
        """Nobody knows what slots have of one model here."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return (
            "the model is neither a DistributedDataParallel nor made with fully_shard, so nothing says which part of it another "
            "number of slots would hold; wrap it, or leave --min-nodes out: then the job waits for a node and leaves with 75"
        )

    def _part(self) -> object:
        """The part of the model that this slot computes, where parameters do not tell."""
        return None

    def _place(self) -> object:
        """Whatever makes two slots with equal tensors run different programs."""
        return None


def _is_state(name: str) -> bool:
    return name.startswith("optimizer.") and ".state." in name


def _best_peers(holders: Sequence[tuple[tuple[int, ...], int]]) -> tuple[int, ...]:
    """Choose the peers that hold the most bytes; intersections count, e.g. of dense and expert parameters' groups."""
    groups = {frozenset(group) for group, _ in holders if group}
    candidates = groups | {a & b for a in groups for b in groups if a & b}
    if not candidates:
        return ()
    covered = {c: sum(nbytes for group, nbytes in holders if c <= set(group)) for c in candidates}
    best = max(candidates, key=lambda c: (covered[c], len(c), sorted(c)))
    return tuple(sorted(best))
