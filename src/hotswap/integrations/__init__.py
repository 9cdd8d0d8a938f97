"""Framework adapters: which state a training program has, who else holds it, and how to make it whole again."""

from hotswap.integrations.base import StateAdapter, TensorEntry, TensorSpec
from hotswap.integrations.discovery import discover

__all__ = ["StateAdapter", "TensorEntry", "TensorSpec", "discover"]
