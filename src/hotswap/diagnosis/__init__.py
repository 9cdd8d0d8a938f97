"""What broke: from evidence to a verdict, a culprit and an action. Nothing here imports torch.

A job calls :func:`diagnose` with what it knows, and :class:`Policy` with the answer; ``hotswap classify`` reads the evidence
from files first.
"""

from __future__ import annotations

from hotswap.diagnosis.cause import RuleBook, diagnose
from hotswap.diagnosis.model import Blames, Culprit, Diagnosis, Evidence, Strength, Verdict
from hotswap.diagnosis.rule import Rule

__all__ = ["Blames", "Culprit", "Diagnosis", "Evidence", "Rule", "RuleBook", "Strength", "Verdict", "diagnose"]
