"""Snapshots and their replicas: memory, ledger, transfer between nodes; capture and restore in the worker.

Nothing is imported here, so that the agent can use memory, vault and transfer without importing torch.
"""
