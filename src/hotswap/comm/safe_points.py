"""Places inside a model's forward and backward pass where a rank may stop when its generation has ended."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from hotswap.comm.groups import Groups


def add_safe_points(module: nn.Module, groups: Groups) -> list[RemovableHandle]:
    """Check the stop flag before the forward of the module, and before the forward and backward of its blocks.

    A block is a member of a ``ModuleList``: easy to find and heavy enough for one more function call not to matter,
    which does not hold for every single module.
    """
    blocks = [child for parent in module.modules() if isinstance(parent, nn.ModuleList) for child in parent]

    def check(*_: Any) -> None:
        groups.check()

    handles = [target.register_forward_pre_hook(check) for target in dict.fromkeys([module, *blocks])]
    # Not on the module itself: the hook wraps outputs in a view, which pipeline schedules do not want of a whole stage.
    handles += [block.register_full_backward_pre_hook(check) for block in dict.fromkeys(blocks)]
    return handles
