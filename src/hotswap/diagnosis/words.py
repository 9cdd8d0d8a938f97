"""The last resort: what a complaint that no rule knows is about, by the words it is made of.

A line with a word of failure and a word of a topic is a *complaint*. It is only context: it decides nothing as long as anything
else was seen, and what it decides is a guess that is never acted upon without a check.
"""

from __future__ import annotations

import re

_FAILS = re.compile(
    r"\b(?:errors?|fail(?:ed|ure|s)?|fatal|unable|cannot|can't|could not|denied|invalid|corrupt\w*|lost|killed|abort\w*|panic|crash\w*"
    r"|critical|unhealthy|broken|missing|mismatch|exceeded|wrong|duplicate|disconnected|hung|stuck|unexpected(?:ly)?|does not|not found)\b",
    re.IGNORECASE,
)
_DENIES = re.compile(
    r"\b(?:no|0|without|ignor\w+|if|on|any|handle\w*|skip\w*) (?:any )?(?:errors?|fail\w*)\b|\b(?:errors?|failures?)['\"]?\W{1,3}(?:0|none|null)\b",
    re.IGNORECASE,
)
"""A failure that did not happen."""
_WAITS = re.compile(
    r"time-?outs?\b|timed out|connection|socket|\bpeer\b|NCCL|HCCL|rendezvous|heartbeat|watchdog", re.IGNORECASE
)
"""Consequences of something else; they have their own rules."""

_TOPICS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("numbers", re.compile(r"\b(?:nan|non-?finite|diverg\w+|explod\w+|loss scale)\b", re.IGNORECASE)),
    (
        "device-memory",
        re.compile(r"(?:HBM|VRAM|GPU|CUDA|cuda|hip|HIP|device)\w*\b.*out of memory|out of memory.*(?:HBM|GPU|device)"),
    ),
    ("memory", re.compile(r"out of memory|\boom\b|memory (?:limit|pressure)|allocate memory", re.IGNORECASE)),
    (
        "storage",
        re.compile(
            r"\b(?:disk|file ?systems?|mount(?:ed|ing)?|inodes?|quota|nvme\w*|nfs|lustre|lnet|ceph\S*|mds\d*|gpfs|weka\w*|parquet|shards?"
            r"|checksum|truncated|corrupt\w*|i/o)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "hardware",
        re.compile(
            r"\b(?:GPUs?|NVRM|Xid|PCIe?|NVLink|NVSwitch|InfiniBand|mlx\d\w*|HCA|firmware|hardware|ECC|thermal|temperature|amdgpu|NPU"
            r"|driver|nodes?|power|reboot\w*|fan)\b",
            re.IGNORECASE,
        ),
    ),
    (
        "service",
        re.compile(r"rate limit|too many|temporar\w+|unavailable|try again|resolve host|throttl\w+", re.IGNORECASE),
    ),
    ("process", re.compile(r"segfault|core dumped|deadlock|\bsignal\b|crash\w*|\babort\w*", re.IGNORECASE)),
    (
        "program",
        re.compile(
            r"\b(?:arguments?|options?|config\w*|invalid|unsupported|unknown|not found|missing|mismatch|versions?|match|must|expected"
            r"|syntax|undefined|installed|supported|validat\w+|usage|duplicate|wrong|permission|parser?|key|module|library|spec)\b",
            re.IGNORECASE,
        ),
    ),
)


def topic(text: str) -> str | None:
    """What the complaint in *text* is about; None if it is none, or only says that somebody waited."""
    if not _FAILS.search(text) or _DENIES.search(text) or _WAITS.search(text):
        return None
    return next((name for name, words in _TOPICS if words.search(text)), None)
