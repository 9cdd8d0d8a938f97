"""The demonstration: real training programs, a killer, and a verdict that compares hashes."""
