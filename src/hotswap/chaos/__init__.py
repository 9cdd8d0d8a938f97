"""Fault drills: a matrix of real jobs that lose something, and single faults on a running job."""
