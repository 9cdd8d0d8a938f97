"""Random generators: Python's, numpy's, torch's and Megatron's tracker."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from typing import Any

import torch

from hotswap.integrations.base import AdapterBase
from hotswap.replication import plaintree

_MEGATRON_RANDOM = "megatron.core.tensor_parallel.random"


class RandomAdapter(AdapterBase):
    """Every random generator a training script may draw from in this process. Must be restored last."""

    def __init__(self) -> None:
        """There is one of these per process."""
        super().__init__("random")

    def objects(self) -> dict[str, Any]:
        """States of all generators that are in use."""
        version, words, gauss = random.getstate()
        tree: dict[str, Any] = {
            "python": (version, struct.pack(f"<{len(words)}I", *words), gauss),
            "torch": torch.get_rng_state(),
        }
        if "numpy" in sys.modules:
            tree["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            tree["cuda"] = torch.cuda.get_rng_state()
        tracker = _megatron_tracker()
        if tracker is not None:
            tree["megatron"] = {name: _as_tensor(state) for name, state in tracker.get_states().items()}
        return tree

    def load_objects(self, tree: dict[str, Any]) -> None:
        """Set all generators."""
        version, packed, gauss = tree["python"]
        random.setstate((version, struct.unpack(f"<{len(packed) // 4}I", packed), gauss))
        torch.set_rng_state(tree["torch"])
        if "numpy" in tree:
            import numpy

            numpy.random.set_state(tree["numpy"])
        if "cuda" in tree:
            torch.cuda.set_rng_state(tree["cuda"])
        tracker = _megatron_tracker()
        if tracker is not None and "megatron" in tree:
            _restore_tracker(tracker, tree["megatron"])


def apart(tree: dict[str, Any], slot: int) -> dict[str, Any]:
    """Generators for *slot*, which has no predecessor of its own: seeded from another slot's state, *tree*, and from its number."""
    seed = hashlib.sha256(plaintree.encode(tree) + slot.to_bytes(8, "little")).digest()
    number = int.from_bytes(seed[:8], "little") >> 1
    version, words, gauss = random.Random(seed).getstate()
    made: dict[str, Any] = {
        "python": (version, struct.pack(f"<{len(words)}I", *words), gauss),
        "torch": torch.Generator().manual_seed(number).get_state(),
    }
    if "numpy" in tree:
        import numpy

        made["numpy"] = numpy.random.RandomState(number % 2**32).get_state()
    if "cuda" in tree:
        made["cuda"] = torch.Generator(device="cuda").manual_seed(number).get_state()
    return made


def _megatron_tracker() -> Any:
    module = sys.modules.get(_MEGATRON_RANDOM)
    tracker = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)
    return tracker if tracker is not None and tracker.is_initialized() else None


def _as_tensor(state: Any) -> torch.Tensor:
    """A tracker for CUDA graphs keeps generators instead of their states."""
    if isinstance(state, torch.Generator):
        return state.get_state()
    assert isinstance(state, torch.Tensor), f"a Megatron random state is a {type(state).__qualname__}"
    return state


def _restore_tracker(tracker: Any, saved: dict[str, torch.Tensor]) -> None:
    live = tracker.get_states()
    restored: dict[str, Any] = {}
    for name, state in saved.items():
        if isinstance(live.get(name), torch.Generator):
            live[name].set_state(state)
            restored[name] = live[name]
        else:
            restored[name] = state
    tracker.set_states(restored)
    # An exception in the middle of nested forks leaves the name of the inner one.
    tracker._current_state_name = "default-rng"
