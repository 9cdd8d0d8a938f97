"""What a message says in ordinary words, where no rule knows it: phrases with which programs of all kinds state a cause.

Names of exceptions say little: a :class:`RuntimeError` may report a full disk, a dead GPU or a wrong shape. Authors of libraries
however use the same few phrases for the same causes. Only phrases that state a failure are listed, never mere topics: a message
that mentions a GPU is not thereby about a broken one (:mod:`hotswap.diagnosis.words` guesses from topics, and is never acted upon).
"""

from __future__ import annotations

import re

_DEVICE = r"(?:GPU|TPU|NPU|XPU|HPU|DCU|[Dd]evice|[Aa]ccelerator|[Nn]ode|HCA|NIC|NVLink|NVSwitch|[Dd]rive|[Cc]ard)s?"

_SAID: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "numbers",
        re.compile(
            r"\b(?i:loss|grad\w*|norm|weights?|outputs?|logits|tensor|values?|activations?|parameters?)\b.{0,40}\b(?:is|are|was|were|became|contains?|has|have|had|of"
            r"|=)\W{0,3}(?:\w+ ){0,2}(?:NaN|nan|Nan|inf|Inf|infinite|non-?finite)s?\b"
            r"|\b(?:NaNs?|Nans?|nans?|[Nn]on-?finite|[Ii]nfinite|Infs?) (?:\w+ ){0,2}(?:loss|grad\w*|values?|outputs?|weights?|found|detected|encountered|in)\b"
            r"|training (?:has )?diverged|loss (?:has )?(?:diverged|exploded)|gradient explosion|division by zero.*scale"
        ),
    ),
    (
        "device-memory",
        re.compile(
            r"(?:CUDA|GPU|HIP|NPU|XPU|HBM|VRAM|device|KV cache).{0,80}(?:[Oo]ut of memory|\bOOM\b|not enough memory|memory is (?:too small|exhausted)|not fit)"
            r"|(?:[Oo]ut of memory|\bOOM\b|[Nn]ot enough memory|[Ii]nsufficient memory).{0,80}\b(?:CUDA|GPU|HIP|NPU|HBM|VRAM|device)"
        ),
    ),
    (
        "memory",
        re.compile(
            r"[Oo]ut of (?:host |system |CPU )?memory|[Cc]annot allocate memory|(?:[Nn]ot enough|[Ii]nsufficient) (?:host |system |CPU |shared )?(?:memory|RAM)"
            r"|memory (?:limit|allocation) (?:was )?(?:exceeded|failed)|[Oo]OM[- ]?[Kk]ill|shared memory .{0,40}(?:exhausted|insufficient|too small|full)"
        ),
    ),
    (
        "storage",
        re.compile(
            r"[Nn]o space left|[Dd]isk (?:is )?(?:full|quota)|[Qq]uota (?:\w+ )?exceeded|[Rr]ead-only file ?system|[Ss]tale (?:NFS )?file|[Ii]nput/output error|\bI/O error"
            r"|\b(?:is|was|be|are|file|data|appears?|seems?|possibly|likely) (?:\w+ )?(?:corrupt(?:ed)?|truncated|incomplete|damaged)\b|[Cc]orrupt(?:ed)? (?:file|data|archive|shard|checkpoint|record|input)"
            r"|[Cc]hecksum|CRC|unexpected(?:ly)? (?:end|EOF)|[Ff]ile write failed|[Ww]rite failed|(?:[Ff]ailed|[Uu]nable) to (?:write|flush|sync|fsync)\b"
            r"|(?:file ?system|mount|disk|volume) .{0,40}(?:not respond|unavailable|unreachable|hung|gone|failed)"
        ),
    ),
    (
        "hardware",
        re.compile(
            rf"\b{_DEVICE}\b.{{0,40}}(?:\bnot (?:yet )?(?:healthy|HEALTHY|responding|ready)|[Uu]nhealthy|UNHEALTHY|\b(?:is|was|has|been) (?:lost|dead|hung|faulty|broken|missing|removed)"
            r"|disappeared|fell off|fallen off|malfunction|unresponsive|\bECC\b|hardware (?:error|failure|fault))"
            r"|[Hh]ardware (?:error|failure|fault)|(?:[Ll]ost|[Ff]aulty|[Bb]roken|[Uu]nhealthy|[Dd]ead) (?:GPU|TPU|NPU|device|node|NIC|card)\b|[Uu]ncorrect(?:able|ed) "
        ),
    ),
    (
        "refused",
        re.compile(
            r"\b(?:401|403|404|410)\b.{0,30}(?:[Uu]nauthori[sz]ed|[Ff]orbidden|[Nn]ot [Ff]ound|Error)|[Uu]nauthori[sz]ed|[Ii]nvalid (?:API |access )?(?:key|token|credentials?)"
            r"|[Aa]ccess (?:is |was )?denied|[Aa]uthentication (?:failed|required)|[Pp]ermission denied|does not exist|[Nn]ot found"
        ),
    ),
    (
        "network",
        re.compile(
            r"[Tt]imed? ?out (?:trying|while|when|connecting|waiting for (?:a )?(?:response|reply|server|connection)|after \d+\w* (?:while|trying))|[Rr]ead timed out|[Cc]onnection timed out"
            r"|[Rr]equest(?:ed)? (?:has )?timed? ?out|(?:[Uu]nable|[Ff]ailed) to (?:connect|reach|resolve|contact|establish)|(?:[Cc]ould(?: not|n't)|[Cc]an(?:no|')t) (?:connect|resolve|reach|contact|communicate)"
            r"|[Tt]emporar(?:y|ily)|[Tt]ry again|[Tt]oo many requests|[Rr]ate ?limit|[Ss]ervice (?:is )?(?:[Uu]navailable|busy)|[Bb]ad [Gg]ateway|[Ii]nternal (?:[Ss]erver )?[Ee]rror"
            r"|[Cc]onnection (?:was )?(?:reset|aborted|closed|dropped|broken|lost)|(?:payload|transfer|response|body) (?:is |was )?(?:not completed|incomplete)|violation of protocol|record layer"
            r"|[Rr]emote end closed|[Nn]ame resolution|[Mm]ax retries|[Dd]ownload (?:failed|error|was interrupted)|(?:[Ff]ailed|[Uu]nable) to (?:download|fetch|upload)|[Ss]erver (?:error|disconnected|is busy|overloaded)"
        ),
    ),
)

_JOB = re.compile(
    r"NCCL|HCCL|RCCL|[Gg]loo|c10d|TCPStore|\b[Ss]tore\b|[Rr]endezvous|\bpeer\b|\b[Rr]ank\b|[Ww]atchdog|[Cc]ollective|\bworkers?\b|[Bb]arrier|[Cc]oordinator|process ?group"
    r"|\bMPI\b|[Mm]aster|[Aa]ctor|[Ee]ngine"
)
"""Talk of the job's own members: then a time-out says that another one is gone, not that a service outside is away."""


def said(message: str) -> str | None:
    """``numbers``, ``device-memory``, ``memory``, ``storage``, ``hardware``, ``refused``, ``network`` or ``echo``; None for none."""
    found = next((name for name, phrases in _SAID if phrases.search(message)), None)
    return "echo" if found == "network" and _JOB.search(message) else found
