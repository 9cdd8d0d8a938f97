"""Turns lines into facts: codes, ranks, groups, sequence numbers, peers, sizes.

A decoder looks at one line and gives the kind of the fact and its fields, or nothing. Rules then ask for fields instead of
repeating expressions. What does not decode stays text, for the text rules.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from hotswap.diagnosis.exceptions import family
from hotswap.diagnosis.find import GRAM, Finder
from hotswap.diagnosis.literals import required_literals
from hotswap.diagnosis.model import Value
from hotswap.diagnosis.words import topic

Facts = dict[str, Value]
Decoder = Callable[["re.Match[str]"], "tuple[str, Facts] | None"]

_UNITS = {"B": 0, "bytes": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "KB": 10, "MB": 20, "GB": 30}
_SIZE = r"([\d.]+) (bytes|[KMGT]i?B|B)"


def size_bytes(number: str, unit: str) -> int:
    """``("1.5", "GiB")`` in bytes; a number that is none counts as 0."""
    try:
        return int(float(number) * (1 << _UNITS.get(unit, 0)))
    except (ValueError, OverflowError):
        return 0


def pci_address(text: str) -> str:
    """``PCI:0000:3D:00.0`` as ``0000:3d:00``; what is no address gives an empty string."""
    match = re.search(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})", text)
    return f"{(match[1] or '0000')[-4:]}:{match[2]}:{match[3]}".lower() if match else ""


# --- NVIDIA kernel messages -----------------------------------------------------------------------------------------


def _xid(match: re.Match[str]) -> tuple[str, Facts] | None:
    detail = match[3]
    facts: Facts = {"code": int(match[2]), "gpu": pci_address(match[1]), "detail": detail[:200]}
    if pid := re.search(r"pid='?(\d+)", detail):
        facts["pid"] = int(pid[1])
    if earlier := re.search(r"previous Xid (\d+)", detail):
        facts["previous"] = int(earlier[1])
    if severity := re.search(r"\b(Non-?fatal|Fatal)\b", detail, re.IGNORECASE):
        facts["fatal"] = severity[1].lower() == "fatal"
    if link := re.search(r"\b[Ll]ink (\d+)", detail):
        facts["link"] = int(link[1])
    if unit := re.match(r",?\s*(?:pid=\S+ )?([A-Z][A-Z0-9_]+) ", detail):
        facts["unit"] = unit[1]
    if words := re.search(r"\((0x[0-9a-fA-F]{8}) (0x[0-9a-fA-F]{8})", detail):
        facts["subcode"] = (int(words[1], 16) >> 20) & 0x3F
        facts["status"] = int(words[2], 16)
    if change := re.search(r"to (0x[0-9a-fA-F]+) \(", detail):
        facts["recovery"] = int(change[1], 16)
    return "xid", facts


def _xid_of_uuid(match: re.Match[str]) -> tuple[str, Facts] | None:
    """As health agents print it: the board by its UUID instead of its address."""
    return "xid", {"code": int(match[1]), "gpu": match[2], "detail": match[3][:200]}


def _xid_bare(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "xid", {"code": int(match[1] or match[2]), "gpu": pci_address(match.string), "detail": ""}


def _sxid(match: re.Match[str]) -> tuple[str, Facts] | None:
    detail = match[3]
    facts: Facts = {"code": int(match[2]), "gpu": pci_address(match[1]), "detail": detail[:200]}
    if severity := re.search(r"\b(Non-fatal|Fatal)\b", detail, re.IGNORECASE):
        facts["fatal"] = severity[1].lower() == "fatal"
    if link := re.search(r"Link (\d+)", detail):
        facts["link"] = int(link[1])
    return "sxid", facts


# --- collectives ----------------------------------------------------------------------------------------------------


def _collective_timeout(match: re.Match[str]) -> tuple[str, Facts] | None:
    text = match.string
    facts: Facts = {"seq": int(match[1]), "op": match[2], "ran_ms": int(match[5] or 0)}
    if match[3]:
        facts["numel_in"], facts["numel_out"] = int(match[3]), int(match[4])
    if group := _GROUP.search(text):
        facts["group"] = group[2] or group[1]
    return "collective_timeout", facts


_GROUP = re.compile(r"\[PG (?:ID )?(\d+)(?:\([^)]*\)| \([^)]*\))?(?: PG GUID (\w+(?:\([^)]*\))?))? Rank \d+\]")


def _collective_state(match: re.Match[str]) -> tuple[str, Facts] | None:
    facts: Facts = {"enqueued": int(match[1]), "completed": int(match[2])}
    if group := _GROUP.search(match.string):
        facts["group"] = group[2] or group[1]
    return "collective_state", facts


def _ib_completion(match: re.Match[str]) -> tuple[str, Facts] | None:
    facts: Facts = {"peer": match[1], "status": int(match[2])}
    if vendor := re.search(r"vendor err (\d+)", match.string):
        facts["vendor_err"] = int(vendor[1])
    return "ib_completion", facts


def _peer_gone(match: re.Match[str]) -> tuple[str, Facts] | None:
    peer = next((group for group in match.groups() if group), "")
    return "peer_gone", {"peer": peer.strip("[]"), "reset": "reset" in match.string}


def _nccl_result(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "nccl_result", {"code": int(match[1])}


def _store_barrier(match: re.Match[str]) -> tuple[str, Facts] | None:
    size, came = int(match[1]), int(match[2])
    return "store_barrier", {"size": size, "came": came, "too_many": came > size}


def _hccl_waits(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "hccl_wait", {"missing": match[1]}


def _missing_ranks(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "stall", {"missing": match[1].strip()}


# --- memory and exits -----------------------------------------------------------------------------------------------


def _cuda_oom(match: re.Match[str]) -> tuple[str, Facts] | None:
    """Sizes in bytes. ``others`` is what other processes hold on the device, where the text says so."""
    text = match.string
    facts: Facts = {"absurd": bool(re.search(r"allocate (?:more than )?[\d.]*\s?(?:EB|EiB|PiB|PB)", text))}
    for name, pattern in _OOM_FIELDS:
        if found := re.search(pattern, text):
            facts[name] = size_bytes(found[1], found[2])
    others = [size_bytes(*found) for found in re.findall(rf"Process \d+ has {_SIZE} memory in use", text)]
    own = re.search(rf"this process has {_SIZE}", text)
    if others:
        facts["others"] = sum(others) if own else sum(sorted(others)[:-1])
    tried, free, total = (int(facts.get(name, 0)) for name in ("tried", "free", "total"))
    facts["absurd"] = bool(facts["absurd"]) or (total > 0 and tried > 16 * total)
    own_bytes = max(int(facts.get("reserved", 0)), int(facts.get("allocated", 0)))
    accounted = own_bytes + int(facts.get("unallocated", 0)) + free
    foreign = own_bytes > 0 and total > 0 and accounted < 0.6 * total
    facts["fits"] = tried > 0 and free > 2 * tried and free > total // 8
    facts["crowded"] = total > 0 and (foreign or int(facts.get("others", 0)) > total // 3)
    return "cuda_oom", facts


_OOM_FIELDS = (
    ("allocated", rf"{_SIZE} already allocated"),
    ("allocated", rf"allocated memory {_SIZE} is allocated by"),
    ("reserved", rf"{_SIZE} reserved in total"),
    ("unallocated", rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    ("tried", rf"Tried to allocate {_SIZE}"),
    ("free", rf"of which {_SIZE} is free"),
    ("free", rf"[;,] {_SIZE} free"),
    ("total", rf"total capaci?ty of {_SIZE}"),
    ("total", rf"; {_SIZE} total capacity"),
)


def _exit_negative(match: re.Match[str]) -> tuple[str, Facts] | None:
    facts: Facts = {}
    code = int(match[1])
    facts["signal" if code < 0 else "code"] = abs(code)
    if code > 128:
        facts["signal"] = code - 128
    for name, pattern in (("local_rank", r"local_rank: (\d+)"), ("pid", r"\(pid: (\d+)\)")):
        if found := re.search(pattern, match.string):
            facts[name] = int(found[1])
    return ("exit", facts) if code != 0 else None


def _exit_signal_name(match: re.Match[str]) -> tuple[str, Facts] | None:
    try:
        return "exit", {"signal": int(signal.Signals[match[1]])}
    except KeyError:
        return None


def _exit_signal_number(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "exit", {"signal": int(next(group for group in match.groups() if group))}


def _shell_exit(match: re.Match[str]) -> tuple[str, Facts] | None:
    """As a shell says how a command of its script ended."""
    return "exit", {"signal": _SRUN_WORDS[match[1]]}


_JOB_STATES = (
    "COMPLETED|FAILED|TIMEOUT|NODE_FAIL|OUT_OF_ME(?:MORY)?|CANCELLED|PREEMPTED|BOOT_FAIL|DEADLINE|REQUEUED|SUSPENDED"
)


def _slurm_job(match: re.Match[str]) -> tuple[str, Facts] | None:
    """One row of sacct, or the line of ``scontrol show job`` with the state."""
    state = "OUT_OF_MEMORY" if match["state"].startswith("OUT_OF_ME") else match["state"]
    facts: Facts = {"state": state}
    if match["signal"]:
        facts |= {"code": int(match["code"]), "signal": int(match["signal"])}
    if reason := re.search(r"Reason=(\w+)(?::(\d+))?", match.string):
        facts["reason"] = reason[1]
        if reason[1] == "RaisedSignal" and reason[2]:
            facts["signal"] = int(reason[2])
    return ("slurm_job", facts) if state != "COMPLETED" else None


def _mpirun_exit(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "exit", {"node": match[2], "rank": int(match[1]), "signal": int(match[3])}


_SRUN_WORDS = {
    "Killed": 9,
    "Terminated": 15,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Illegal instruction": 4,
}


def _srun_exit(match: re.Match[str]) -> tuple[str, Facts] | None:
    facts: Facts = {"node": match[1]}
    how = match[2]
    if how.startswith("Exited with exit code"):
        code = int(how.rsplit(" ", 1)[-1])
        facts["signal" if code > 128 else "code"] = code - 128 if code > 128 else code
        return "exit", facts
    facts["signal"] = _SRUN_WORDS[how]
    return "exit", facts


def _closing(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "closing", {"pid": int(match[1]), "signal": match[2]}


def _host_memory(match: re.Match[str]) -> tuple[str, Facts] | None:
    return "host_memory", {"bytes": size_bytes(match[1], match[2])}


def _saving(_: re.Match[str]) -> tuple[str, Facts] | None:
    return "saving", {}


def _restart(_: re.Match[str]) -> tuple[str, Facts] | None:
    """A line with which a launcher or a program begins (again)."""
    return "restart", {}


def _pulse(_: re.Match[str]) -> tuple[str, Facts] | None:
    """A line that a supervisor prints to say that the job still exists."""
    return "pulse", {}


def _supervising(_: re.Match[str]) -> tuple[str, Facts] | None:
    """A frame of the launcher's loop over running workers."""
    return "supervising", {}


def _starting(_: re.Match[str]) -> tuple[str, Facts] | None:
    """A frame that runs before any model is built."""
    return "starting", {}


def _loading(_: re.Match[str]) -> tuple[str, Facts] | None:
    return "loading", {}


# --- exceptions and progress ----------------------------------------------------------------------------------------


def _exception(match: re.Match[str]) -> tuple[str, Facts] | None:
    message = (match[3] or "").strip()
    if match[2]:  # A wrapper that names what it wraps: RayTaskError(ValueError).
        return "exception", {"type": match[2], "family": family(match[2], message), "message": message[:300]}
    return "exception", {"type": match[1], "family": family(match[1], message), "message": message[:300]}


def _native_exception(match: re.Match[str]) -> tuple[str, Facts] | None:
    """As the C++ run-time prints an exception that nobody caught."""
    message = match[3].strip()
    return "exception", {"type": "C++", "family": family("C++", message), "message": message[:300]}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _progress(match: re.Match[str]) -> tuple[str, Facts] | None:
    step = next((group for group in match.groups() if group), None)
    facts: Facts = {"step": int(step)} if step else {}
    for name, pattern in _PROGRESS_FIELDS:
        if (found := pattern.search(match.string)) and (value := _number(found[1])) is not None:
            facts[name] = value
    return "progress", facts


_PROGRESS_FIELDS = (
    ("seconds", re.compile(r"(?:elapsed time per iteration \(s\)|step_time|iteration time)\W{1,3}([\d.]+)")),
    ("loss", re.compile(r"\b(?:lm )?loss\W{1,4}([\d.eE+-]+|nan|NaN|inf)")),
    ("grad_norm", re.compile(r"\bgrad[_ ]norm\W{1,4}([\d.eE+-]+|nan|NaN|inf)")),
)

# Tried in this order; the first that matches and decodes wins. Lines that a text rule should see whole must not match here.
_DECODERS: tuple[tuple[re.Pattern[str], Decoder], ...] = (
    (re.compile(r"\bSXid \((?:PCI:)?([^)]*)\): (\d+),?(.*)"), _sxid),
    (re.compile(r"\bXid=(\d+) on Device=(\S+?)(?:,|$)(.*)"), _xid_of_uuid),
    (re.compile(r"\bXid \((?:PCI:)?([^)]*)\): (\d+)\b,?(.*)"), _xid),
    (
        re.compile(
            r"collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
            r"(?:, (?:TensorShape=\[[^\]]*\], )?NumelIn=(\d+), NumelOut=(\d+))?.*?(?:ran for (\d+) milliseconds|$)"
        ),
        _collective_timeout,
    ),
    (re.compile(r"last enqueued(?: NCCL)? work: (\d+), last completed(?: NCCL)? work: (\d+)"), _collective_state),
    (
        re.compile(r"Got completion from peer ([\w.:]+?)(?:<\d+>)? with (?:status=|error )(?:IBV_\w+\()?(\d+)"),
        _ib_completion,
    ),
    (re.compile(r"store.based.barrier.*\(world_size=(\d+), worker_count=(\d+)"), _store_barrier),
    (re.compile(r"EI0002.*remote rank: ?\[(\d{1,6})\]"), _hccl_waits),
    (re.compile(r"missing ranks: ?([\d, ]+)\]"), _missing_ranks),
    (
        re.compile(
            r"srun: error: ([\w.-]+): tasks? [\d,\-]+: "
            r"(Killed|Terminated|Segmentation fault|Bus error|Aborted|Illegal instruction|Exited with exit code \d+)"
        ),
        _srun_exit,
    ),
    (
        re.compile(
            rf"^\d+(?:_\d+)?(?:\.\w+)?\+?[ |].{{0,200}}?(?<=[ |])(?P<state>{_JOB_STATES})\+?(?: by \d+)?[ |]+"
            r"(?:.{0,200}?[ |])?(?P<code>\d+):(?P<signal>\d+)\b"
        ),
        _slurm_job,
    ),
    (re.compile(rf"JobState=(?P<state>{_JOB_STATES})\b(?P<code>)(?P<signal>)"), _slurm_job),
    (re.compile(r"failed \(exitcode: (-?\d+)\)"), _exit_negative),
    (re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: \d+\)"), _exit_negative),
    (
        re.compile(
            r"(?:XID|Xid)[ =:#]+(\d{1,3}) (?:detected|reported|on GPU)|(?:[Dd]etected XID|[Dd]etected Xid|XID error|Xid error|Xid code|XID code|NVIDIA Xid|GPU XID|GPU Xid|\(XID|\(Xid)"
            r"[ =:#]+(\d{1,3})\b"
        ),
        _xid_bare,
    ),
    (
        re.compile(
            r"(?:exits with return code = |return code:? |returned non-zero exit status |non-zero exit status "
            r"|[Ee]xit(?:ed)?(?: with)?[ _-]?(?:[Cc]ode|[Ss]tatus)(?: (?:is|was|of))?[:= (\"']{1,20}|exit[Cc]ode['\"]?[:= ]{1,3}"
            r"|EXIT CODE: +)(-?\d+)\b"
        ),
        _exit_negative,
    ),
    (re.compile(r"terminated with signal (SIG[A-Z]+)"), _exit_signal_name),
    (re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)"), _mpirun_exit),
    (re.compile(r"died with <Signals\.(SIG[A-Z]+): \d+>"), _exit_signal_name),
    (re.compile(r"(?:[Tt]erminated|[Kk]illed) by (?:signal )?(SIG[A-Z]+)"), _exit_signal_name),
    (
        re.compile(r"(?:terminated|killed|exited) (?:by|on|with) signal[: (]{1,3}(\d+)(?: |\)|,|\.|$)"),
        _exit_signal_number,
    ),
    (
        re.compile(r"status=(\d+)/(?:KILL|SEGV|ABRT|BUS|TERM|ILL)\b|EXIT STRING: [\w ]+ \(signal (\d+)\)"),
        _exit_signal_number,
    ),
    (re.compile(r"line \d+: +\d+ (Killed|Segmentation fault|Bus error|Illegal instruction)\b"), _shell_exit),
    (re.compile(r"Signal \d+ \((SIG[A-Z]+)\) received by PID"), _exit_signal_name),
    (
        re.compile(r"(?:CUDA|HIP|NPU|XPU) out of memory|OutOfMemoryError: (?:CUDA|HIP|NPU)|NPU out of memory"),
        _cuda_oom,
    ),
    (
        re.compile(
            r"Connection closed by (?:remote )?peer \[?([\w.:-]*?)\]?(?:<\d+>|:\d+|$|[,. ])"
            r"|Call to \w+ (?:from|to) ([\d.a-f:]+?)<\d+> failed : (?:Connection reset|Broken pipe|Connection closed)"
            r"|(?:recv|send|write|read)\w* (?:\w+ )*failed : (?:Connection reset|Broken pipe)"
            r"|Read error \[([\d.a-f:]+)\]:\d+: Connection reset"
            r"|Socket recv failed|recvValue failed|failed to recv, got 0 bytes|sendBytes failed"
        ),
        _peer_gone,
    ),
    (re.compile(r"NCCL INFO .*-> ?(\d)\b(?: \[|$)"), _nccl_result),
    (re.compile(r"\"message\\*\": \\*\"(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception))()(?:: ?([^\"]*))?"), _exception),
    (re.compile(r"^what\(\):\s+()()(.*)"), _native_exception),
    (re.compile(r"\b(?:num_nodes_waiting|_monitor_workers|_state_holder\.sync)\("), _supervising),
    (re.compile(r"\b(?:barrier|init_process_group|set_device|_lazy_init|main_process_first)\("), _starting),
    (re.compile(r"[Ss]aving (?:model |the )?(?:checkpoint|state|snapshot)|save_checkpoint\("), _saving),
    (re.compile(r"\bPULSE\b|[Jj]ob is (?:still )?running|[Hh]eartbeat: (?:ok|alive|running)"), _pulse),
    (re.compile(r"Sending process (\d+) closing signal (SIG[A-Z]+)"), _closing),
    (re.compile(r"(?:CPU|host|RAM)\W(?:memory )?(?:usage|used|RSS)\W{1,3}([\d.]+) ?([KMG]i?B)"), _host_memory),
    (re.compile(r"Loading checkpoint shards|Loading (?:model|weights|checkpoint)"), _loading),
    (
        re.compile(
            r"Starting elastic_operator|[Rr]estarting worker group|[Ss]tart(?:ing)? workers? (?:group|for entrypoint)"
            r"|[Rr]esum(?:ing|ed) (?:training )?from|[Ll]oaded checkpoint .{0,200} at iteration|[Ss]tarting with JobEnvironment"
        ),
        _restart,
    ),
    (re.compile(r"\biter(?:ation)?\s+(\d+)\s*/\s*\d+ \|"), _progress),
    (re.compile(r"\b(?:step|iter)\b:?\s+(\d+)\b.{0,60}\bloss\b|\bTraining: step (\d+)"), _progress),
    (re.compile(r"^(?:(?:Epoch|Steps|Train\w*)\b[^|%]{0,40})?\s*\d+%\|[^|]{0,200}\|\s*(\d+)/\d+ \["), _progress),
    (re.compile(r"\{'loss': (?:[\d.eE+-]+|nan|inf)\b()"), _progress),
    (
        re.compile(
            r"(?:^|(?<=[\])|│*>:] )|(?<=Uncaught )|(?<= - ))(?:[\w.]+\.)?_?"
            r"([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|OutOfResources|Unavailable|Invalid|Requests|Expired|ProcessPool"
            r"|BadZipFile)|Exception(?=: ?\S)|[a-z]\w+\.[eE]rror|std::\w+_error)"
            r"(?:\(([A-Z]\w*(?:Error|Exception))\))?(?:: ?(.*))?$"
        ),
        _exception,
    ),
)

_QUALIFIED = re.compile(r"^(?:[a-z_]\w*\.)+([A-Z]\w+)()(?:: (.*))$")
"""A class with its module in front of a message, whatever its name ends in. Not looked for in large files: no literal is certain."""

LINE_PATTERNS: tuple[str, ...] = tuple(
    pattern.pattern
    for pattern, decoder in _DECODERS
    if decoder not in (_progress, _nccl_result, _host_memory, _loading, _supervising, _starting, _saving, _pulse)
)
"""What a scanner must not skip. Progress and result codes are only context, and would be most of a log."""


_ALWAYS: list[int] = []
"""Places of decoders that no literal announces."""
_BY_LITERAL: dict[str, list[int]] = {}
for _place, (_pattern, _) in enumerate(_DECODERS):
    _needed = required_literals(_pattern.pattern)
    if not _needed or min(map(len, _needed)) < GRAM:
        _ALWAYS.append(_place)
    else:
        for _literal in _needed:
            _BY_LITERAL.setdefault(_literal, []).append(_place)
_FINDER = Finder(_BY_LITERAL)


def decode(text: str) -> tuple[str, Facts]:
    """The kind of fact in *text* and its fields; ``("line", {})`` if it is only text."""
    tried = set(_ALWAYS).union(*(_BY_LITERAL[literal] for literal in _FINDER.within(text)))
    for place in sorted(tried):
        pattern, decoder = _DECODERS[place]
        if (match := pattern.search(text)) and (decoded := decoder(match)):
            return decoded
    if (match := _QUALIFIED.match(text)) and (decoded := _exception(match)):
        return decoded
    about = topic(text)
    return ("complaint", {"topic": about}) if about else ("line", {})
