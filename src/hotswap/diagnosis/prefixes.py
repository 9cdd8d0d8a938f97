"""Takes off what launchers put in front of a line, and keeps what it says: rank, node and time.

Known are torchrun (``[rank3]:``, ``[default3]:``), Slurm's ``srun --label`` (``3:``), mpirun (``[1,3]<stderr>:``), kubectl
(``[pod/name/container]``), Ray (``(Worker pid=1, ip=…)``), NCCL (``host:pid:tid [gpu]``), pdsh (``host:``), glog, syslog and
dmesg, and any time in ISO form. A line may carry several, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

PREFIXES_MAX = 6

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], start=1
    )
}


@dataclass
class Label:
    """What the prefixes of one line said. ``text`` is the rest."""

    text: str
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    time: float | None = None
    indented: bool = False
    """Whether the rest began with blanks: a frame or the source line of a traceback, not the exception itself."""


_RANK = re.compile(r"\s*\[rank(\d+)\]:\s?")
_DEFAULT = re.compile(r"\s*\[[A-Za-z]+(\d+)\]:\s?")
_SRUN = re.compile(r"\s*(\d{1,6}): ")
_MPIRUN = re.compile(r"\[\d+,(\d+)\]<std(?:err|out)>:\s?")
_KUBECTL = re.compile(r"\[pod/([^/\]\s]+)(?:/[^\]\s]+)?\]:? ")
_RAY = re.compile(r"\((?:[\w.]+ )?pid=\d+(?:, ip=([\w.:-]+))?\) ")
_NCCL = re.compile(r"([\w.-]+):\d+:\d+ (?=\[\d+\])")
_NCCL_SHORT = re.compile(r"([\w-]+-\d+) (?=\[\d+\])")
# A device of the kernel looks like a host name, but says nothing about where it is.
_HOST = re.compile(
    r"(?!nvidia|nvme|mlx|eth|enp|eno|ib\d|bond|gpu|cuda|sd[a-z]\d?:|md\d|rank|step|epoch|iter)([a-z][a-z0-9.-]*-?\d+): "
)
_SYSLOG = re.compile(r"([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.\d+)? ([\w.-]+) (?=[\w.@/-]+(?:\[\d+\])?:)")
_DMESG = re.compile(r"\[\s*\d+\.\d+\](?:\[[ \w]+\])? ")
_DMESG_T = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\] ?")
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+)")
_ISO = re.compile(r"\[?(\d{4})-(\d\d)-(\d\d)[T :-](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\]?:?\s?")
_RANK_INSIDE = re.compile(r"\[(?:PG [^\]]*?)?[Rr]ank (\d+)\]|RankID:(\d+)")


def _seconds(parts: tuple[int, int, int, int, int, int], zone: str | None = None) -> float | None:
    """Year, month, day, hour, minute and second in seconds since the epoch; None for what is no date."""
    try:
        seconds = datetime(*parts[:5], min(parts[5], 59), tzinfo=timezone.utc).timestamp()
    except (ValueError, OverflowError):
        return None
    if zone and zone != "Z":
        sign = 1 if zone[0] == "+" else -1
        offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
        seconds -= sign * offset.total_seconds()
    return seconds


def _set_rank(label: Label, match: re.Match[str], _: int) -> None:
    label.rank = int(match[1])


def _set_local(label: Label, match: re.Match[str], _: int) -> None:
    label.local_rank = int(match[1])


def _set_node(label: Label, match: re.Match[str], _: int) -> None:
    if match[1]:
        label.node = match[1]


def _set_iso(label: Label, match: re.Match[str], _: int) -> None:
    year, month, day, hour, minute, second = (int(match[index]) for index in range(1, 7))
    seconds = _seconds((year, month, day, hour, minute, second), match[8])
    if seconds is not None:
        label.time = seconds + float(f"0.{match[7] or 0}")


def _set_syslog(label: Label, match: re.Match[str], year: int) -> None:
    label.node = match[6]
    month = _MONTHS.get(match[1])
    if month is not None:
        label.time = _seconds((year, month, int(match[2]), int(match[3]), int(match[4]), int(match[5])))


def _set_dmesg(label: Label, match: re.Match[str], _: int) -> None:
    month = _MONTHS.get(match[1])
    if month is not None:
        label.time = _seconds((int(match[6]), month, int(match[2]), int(match[3]), int(match[4]), int(match[5])))


def _nothing(_: Label, __: re.Match[str], ___: int) -> None:
    """Seconds since boot: another clock on every node, so of no use for an order across nodes."""


_Setter = Callable[[Label, "re.Match[str]", int], None]
_PREFIXES: tuple[tuple[re.Pattern[str], _Setter], ...] = (
    (_RANK, _set_rank),
    (_DMESG_T, _set_dmesg),
    (_DMESG, _nothing),
    (_ISO, _set_iso),
    (_SYSLOG, _set_syslog),
    (_MPIRUN, _set_rank),
    (_KUBECTL, _set_node),
    (_RAY, _set_node),
    (_NCCL, _set_node),
    (_NCCL_SHORT, _set_node),
    (_DEFAULT, _set_local),
    (_SRUN, _set_rank),
    (_HOST, _set_node),
)


def read_label(line: str, *, year: int) -> Label:
    """Rank, node and time of *line*, and its text without the prefixes. ``year`` is for formats that print none."""
    label = Label(line)
    at = 0
    for _ in range(PREFIXES_MAX):
        for pattern, setter in _PREFIXES:
            match = pattern.match(line, at)
            if match and match.end() > at:
                setter(label, match, year)
                at = match.end()
                break
        else:
            break
    rest = line[at:]
    label.text, label.indented = rest.strip(), rest[:1].isspace()
    if label.time is None:
        label.time = _time_inside(label.text, year)
    if label.rank is None and (inside := _RANK_INSIDE.search(label.text)):
        label.rank = int(inside[1] or inside[2])
    return label


def _time_inside(text: str, year: int) -> float | None:
    """A time that does not stand at the very start: glog behind its level letter, or ISO within the first words."""
    if glog := _GLOG.match(text):
        month, day, hour, minute, second = (int(glog[index]) for index in range(1, 6))
        seconds = _seconds((year, month, day, hour, minute, second))
        return None if seconds is None else seconds + float(f"0.{glog[6]}")
    if iso := _ISO.search(text, 0, 80):
        label = Label(text)
        _set_iso(label, iso, year)
        return label.time
    return None
