"""NVIDIA Xid codes: what each means for a training job.

The facts are those of NVIDIA's Xid catalogue; the verdicts are ours and follow its recommended actions: *restart the
application* is a process fault, *reset the GPU*, *reboot* and *contact support* end the node's membership, *ignore* is only
context.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.diagnosis.model import Strength, Verdict

CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One code. ``hardware``: the application cannot have caused it, so it never counts as a user's error."""

    code: int
    meaning: str
    verdict: Verdict
    strength: Strength
    confidence: float
    hardware: bool = False
    echo_of: tuple[int, ...] = ()


_HARD = (Verdict.NODE_FAULT, Strength.PROOF, 0.9, True)
_APP = (Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.65, False)
_MIXED = (Verdict.PROCESS_FAULT, Strength.SYMPTOM, 0.6, False)
_NOTE = (Verdict.TRANSIENT, Strength.CONTEXT, 0.65, False)
_Kind = tuple[Verdict, Strength, float, bool]

_FATAL_BEFORE = (46, 48, 62, 79, 95, 119, 120, 140, 143, 158, 167)
"""What kills a GPU, so that whatever its channels say next is only about that."""

_ROWS: tuple[tuple[tuple[int, ...], str, _Kind, tuple[int, ...]], ...] = (
    ((8,), "work given to the GPU stopped making progress", _MIXED, _FATAL_BEFORE),
    ((11, 25), "malformed command stream", _APP, _FATAL_BEFORE),
    ((13,), "a kernel did something illegal (bounds, alignment, instruction)", _APP, _FATAL_BEFORE),
    ((31,), "page fault: a kernel touched an address its process does not own", _APP, _FATAL_BEFORE),
    ((32,), "the DMA engine read a corrupt push buffer: driver, or PCIe corruption", _MIXED, _FATAL_BEFORE),
    ((37, 66, 67, 141), "the driver used the firmware's registers wrongly", _NOTE, ()),
    ((38,), "context-switch firmware watchdog", _NOTE, ()),
    (
        (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
        "copy engine exception",
        _MIXED,
        _FATAL_BEFORE,
    ),
    ((43,), "a channel was reset after a fault of its application; the GPU stays usable", _APP, _FATAL_BEFORE),
    ((44,), "engine fault during a context switch", _MIXED, _FATAL_BEFORE),
    ((46,), "the GPU stopped answering the driver", _HARD, ()),
    ((48,), "uncorrectable (double-bit) memory error", _HARD, ()),
    ((54,), "auxiliary power is not connected", _HARD, ()),
    ((60, 78, 166, 170), "security or virtualisation engine exception", _MIXED, ()),
    ((61,), "the power micro-controller met a breakpoint", _HARD, ()),
    ((62,), "the power micro-controller halted", _HARD, (79,)),
    ((63,), "a page or row was marked for remapping; takes effect at the next reset", _NOTE, ()),
    ((64,), "a page or row could not be remapped: the spare rows are used up", _HARD, ()),
    (
        (68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142),
        "video, JPEG or optical-flow engine exception",
        _APP,
        _FATAL_BEFORE,
    ),
    ((69,), "illegal method or data for the compute class", _APP, _FATAL_BEFORE),
    ((74,), "NVLink error on the link that is named", (Verdict.NODE_FAULT, Strength.PROOF, 0.75, True), (79,)),
    ((79,), "the GPU fell off the PCIe bus", (Verdict.NODE_FAULT, Strength.PROOF, 0.95, True), ()),
    ((80,), "data sent to the GPU arrived with a wrong checksum", _MIXED, (79,)),
    ((92,), "many corrected single-bit errors", _NOTE, ()),
    ((93, 106, 107, 152, 153, 162, 163, 164, 165, 185), "bookkeeping of the board", _NOTE, ()),
    (
        (94,),
        "contained memory error: only the process that read the bad data was stopped",
        (Verdict.PROCESS_FAULT, Strength.PROOF, 0.8, True),
        (64, 95, 140),
    ),
    ((95,), "uncontained memory error: nothing computed on this GPU since may be trusted", _HARD, ()),
    ((109,), "a context switch did not finish", (Verdict.NODE_FAULT, Strength.PROOF, 0.55, True), (79, 119)),
    ((110,), "security fault", _HARD, ()),
    ((119,), "the GPU's system processor did not answer", (Verdict.NODE_FAULT, Strength.PROOF, 0.85, True), (79,)),
    ((120,), "the GPU's system processor crashed", (Verdict.NODE_FAULT, Strength.PROOF, 0.85, True), (79,)),
    ((121,), "corrected error on the link between CPU and GPU", _NOTE, ()),
    ((136,), "an NVLink could not be trained", _HARD, ()),
    ((137,), "page fault that came over NVLink: look at the process on the peer GPU first", _APP, _FATAL_BEFORE),
    ((140,), "uncorrectable memory error that escaped containment", _HARD, ()),
    ((143,), "the GPU did not initialise", _HARD, (79,)),
    ((144, 145, 146), "NVLink 5 link unit error", (Verdict.NODE_FAULT, Strength.PROOF, 0.75, True), (149, 150)),
    ((147, 148), "NVLink 5 link unit error of a non-fatal kind", _NOTE, (149, 150)),
    ((149,), "NVLink 5 network interface event", (Verdict.NODE_FAULT, Strength.PROOF, 0.85, True), (79,)),
    ((150,), "NVLink 5 management engine stopped", _HARD, ()),
    ((151,), "key rotation failed", _HARD, ()),
    ((155,), "links were shut down by software, for example because a peer is missing", _HARD, (79,)),
    ((156,), "a resource of the GPU was retired", (Verdict.PROCESS_FAULT, Strength.PROOF, 0.6, True), ()),
    ((157, 161), "a resource of the GPU could not be retired", _HARD, ()),
    ((158,), "fatal time-out of the GPU", _HARD, (79,)),
    ((159,), "error on the coherent link of a Grace system", _MIXED, ()),
    ((160,), "a memory channel was retired: the GPU has less memory from now on", _NOTE, ()),
    ((167,), "fatal PCIe time-out", _HARD, ()),
    ((168,), "the GPU has lost part of its memory", _HARD, ()),
    ((169,), "the security micro-controller halted", _HARD, ()),
    ((171,), "uncorrectable error in the GPU's DRAM", _HARD, ()),
    ((172,), "uncorrectable error in the GPU's SRAM, which cannot be remapped", _HARD, ()),
)


def _expanded() -> dict[int, Xid]:
    table: dict[int, Xid] = {}
    for codes, meaning, (verdict, strength, confidence, hardware), echo_of in _ROWS:
        for code in codes:
            if code in table:
                raise ValueError(f"Xid {code} has two rows")
            table[code] = Xid(
                code=code,
                meaning=meaning,
                verdict=verdict,
                strength=strength,
                confidence=confidence,
                hardware=hardware,
                echo_of=echo_of,
            )
    return table


XIDS: dict[int, Xid] = _expanded()
"""By code. 45 (clean-up) and 154 (recommended recovery) are not here: they have rules of their own."""

RECOVERY = {0: "none", 1: "reset the GPU", 2: "reboot the node", 3: "drain peer traffic", 4: "drain and reset"}
"""What Xid 154 recommends, by the number in its text."""

NETIR_PEER = (21, *range(32, 38))
"""Sub-codes of Xid 149 with which the other end of the link is at fault."""
NETIR_SOFTWARE = (*range(15, 19), 22, 38)
"""Sub-codes of Xid 149 with which software or an operator shut the link."""
