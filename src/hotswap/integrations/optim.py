"""State of a torch.optim optimizer: tensors that appear with the first update, and scalars in its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hotswap.errors import LayoutMismatch
from hotswap.integrations.base import TensorEntry, TensorSpec, local, place_of


class OptimizerState:
    """Names each parameter ``<prefix>.<group>.<position>``: order is the identity that torch's state_dict uses too."""

    def __init__(self, optimizer: torch.optim.Optimizer, prefix: str) -> None:
        """Does not change ``optimizer``."""
        self.optimizer = optimizer
        self.prefix = prefix

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter with its name."""
        for group_index, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"{self.prefix}.{group_index}.{index}", parameter

    def entries(self, is_shared: Callable[[torch.Tensor], bool]) -> Iterator[TensorEntry]:
        """Each parameter and each tensor of its state."""
        for name, parameter in self.parameters():
            shared = is_shared(parameter)
            yield _entry(f"{name}.param", parameter, shared)
            state = self._state_of(parameter)
            for key in sorted(key for key, value in state.items() if isinstance(value, torch.Tensor)):
                yield _entry(f"{name}.state.{key}", state[key], shared)

    def fingerprint(self) -> object:
        """Identities of all parameters and state values; a loop in C but for the outer one."""
        state = self.optimizer.state
        return (
            [list(map(id, group["params"])) for group in self.optimizer.param_groups],
            list(map(tuple, state.values())),
            [id(value) for values in state.values() for value in values.values() if isinstance(value, torch.Tensor)],
        )

    def check(self, wanted: Mapping[str, TensorSpec]) -> None:
        """LayoutMismatch if ``wanted`` has state for a parameter that does not exist."""
        known = {name for name, _ in self.parameters()}
        for name in wanted:
            owner, separator, _ = name.partition(".state.")
            if name.startswith(f"{self.prefix}.") and separator and owner not in known:
                raise LayoutMismatch(f"the snapshot has {name}, but this optimizer has no such parameter")

    def arrange(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Make the state tensors exactly those of ``wanted``; those that fit already stay the same objects."""
        by_owner: dict[str, dict[str, TensorSpec]] = {}
        for name, spec in wanted.items():
            owner, separator, key = name.partition(".state.")
            if separator:
                by_owner.setdefault(owner, {})[key] = spec
        for name, parameter in self.parameters():
            specs = by_owner.get(name, {})
            state = self.optimizer.state.get(parameter)
            if state is None:
                if not specs:
                    continue
                state = self.optimizer.state[parameter] = {}
            for key in [k for k, v in state.items() if isinstance(v, torch.Tensor) and k not in specs]:
                del state[key]
            for key, spec in specs.items():
                if not _fits(state.get(key), spec):
                    state[key] = _make(spec, parameter)
            if not state:
                del self.optimizer.state[parameter]

    def objects(self) -> dict[str, Any]:
        """Group settings (learning rate, betas ...) and the state values that are no tensors."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        values = {}
        if any(not isinstance(v, torch.Tensor) for state in self.optimizer.state.values() for v in state.values()):
            for name, parameter in self.parameters():
                plain = {k: v for k, v in self._state_of(parameter).items() if not isinstance(v, torch.Tensor)}
                if plain:
                    values[name] = plain
        return {"groups": groups, "values": values}

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Put back what `objects` returned; a tensor learning rate is overwritten in place."""
        for group, saved in zip(self.optimizer.param_groups, tree["groups"], strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            for key, value in saved.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    with torch.no_grad():
                        group[key].copy_(value)
                else:
                    group[key] = value
        for name, parameter in self.parameters():
            saved = tree["values"].get(name, {})
            state = self.optimizer.state.get(parameter, {})
            for key in [k for k, v in state.items() if not isinstance(v, torch.Tensor) and k not in saved]:
                del state[key]
            if saved:
                self.optimizer.state.setdefault(parameter, {}).update(saved)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        # The state is a defaultdict: looking a parameter up would add it, and change what the optimizer does next.
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return state


def _entry(name: str, tensor: torch.Tensor, shared: bool) -> TensorEntry:
    is_dtensor, place = isinstance(tensor, DTensor), place_of(tensor)
    return TensorEntry(name=name, tensor=local(tensor), shared=shared, is_dtensor=is_dtensor, place=place)


def _fits(value: object, spec: TensorSpec) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) is not spec.is_dtensor:
        return False
    part = local(value)
    return part.dtype == spec.dtype and tuple(part.shape) == spec.shape and part.device.type == spec.device_type


def _make(spec: TensorSpec, parameter: torch.Tensor) -> torch.Tensor:
    home = local(parameter)
    device = home.device if spec.device_type == home.device.type else torch.device(spec.device_type)
    part = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if not spec.is_dtensor:
        return part
    if not isinstance(parameter, DTensor):
        raise LayoutMismatch("the snapshot has a sharded optimizer state for a parameter that is not sharded here")
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
