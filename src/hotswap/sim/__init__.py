"""Seeded simulation of whole jobs: the real coordinator among modelled agents, workers, networks and faults."""
