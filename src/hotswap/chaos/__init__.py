"""Fault drills: a matrix of real jobs that lose something."""
