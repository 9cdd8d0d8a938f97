"""Processes of a node: the agent, its workers, the fork server they come from; and the coordinator. None imports torch."""
