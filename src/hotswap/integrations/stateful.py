"""Anything with state_dict and load_state_dict: loaders, learning-rate schedulers, loss scalers."""

from __future__ import annotations

from typing import Any

import torch

from hotswap.errors import UsageError
from hotswap.integrations.base import AdapterBase
from hotswap.replication import plaintree


class StatefulAdapter(AdapterBase):
    """State of one object, through its own two methods."""

    def __init__(self, name: str, target: Any) -> None:
        """UsageError if ``target`` has not got the two methods."""
        super().__init__(name)
        missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(target, m, None))]
        if missing:
            raise UsageError(
                f"{name} is a {type(target).__qualname__} without {' and '.join(missing)}: hotswap must know its position "
                "to redo a step exactly; give it the two methods (for a DataLoader use torchdata's StatefulDataLoader)"
            )
        self._target = target

    def objects(self) -> dict[str, Any]:
        """What ``state_dict`` returns."""
        return {"state": self._target.state_dict()}

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Hand it to ``load_state_dict``. UsageError if that does not bring the object back to where it was."""
        if type(self._target).__name__ == "OptimizerParamScheduler":
            # Megatron's adds the saved number of steps to the present one, as it expects a new object.
            self._target.num_steps = 0
        self._target.load_state_dict(tree["state"])
        if plaintree.encode(self._target.state_dict()) != plaintree.encode(tree["state"]):
            raise UsageError(
                f"load_state_dict of {self.name} ({type(self._target).__qualname__}) does not restore what state_dict returned: "
                "a step could not be redone exactly; mend the two methods"
            )

    def reset(self) -> None:
        """Let a torch GradScaler forget that it has unscaled or stepped in the failed attempt."""
        if isinstance(self._target, torch.amp.GradScaler):
            self._target._per_optimizer_states.clear()
