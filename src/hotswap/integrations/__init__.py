"""Framework adapters: which state a training program has, who else holds it, and how to make it whole again."""

from hotswap.integrations.base import StateAdapter, TensorEntry, TensorSpec
from hotswap.integrations.discovery import discover
from hotswap.integrations.frames import forget_frames

__all__ = ["StateAdapter", "TensorEntry", "TensorSpec", "discover", "forget_frames"]
