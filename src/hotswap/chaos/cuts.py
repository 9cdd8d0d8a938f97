"""Jobs on hosts of their own between which the network fails."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.chaos.hosts import END_S, Hosts
from hotswap.chaos.network import Network, network
from hotswap.demo.runner import POLL_S, JobSpec, Tail


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What becomes of the network of the host *node* once *step* is committed.

    ``lost``: who no longer hears whom, as (sender, receiver). ``kbit_per_s``: all that its link lets through, if not 0.
    ``lasts_s``, ``lasts_steps``: after so many seconds or steps everything passes again; both 0: never.
    """

    kind: str
    node: str
    step: int
    lost: tuple[tuple[str, str], ...] = ()
    kbit_per_s: int = 0
    lasts_s: float = 0.0
    lasts_steps: int = 0

    @property
    def heals(self) -> bool:
        """Whether the job goes on with it."""
        return self.lasts_s > 0 or self.lasts_steps > 0

    def do(self, net: Network) -> None:
        """Do it."""
        for sender, receiver in self.lost:
            net.cut(sender, receiver)
        if self.kbit_per_s:
            net.narrow(self.node, self.kbit_per_s)


def host_names(nodes: int, spares: int) -> tuple[str, ...]:
    """Of a job's hosts, in the order in which they get places; the last one, a spare's, has the coordinator as well."""
    return tuple(f"node{number}" for number in range(nodes + spares))


def run_on_hosts(spec: JobSpec, cuts: Sequence[Cut]) -> int:
    """Run the job with each of its nodes on a host of its own, and *cuts* between them; its exit code.

    That is the coordinator's launcher's, or, if that is 0, the first other one of the hosts that were reached at the end.
    TimeoutError if one of these launchers does not end, UsageError if there can be no such network here. Whatever happens,
    KeyboardInterrupt included, neither processes nor namespaces of the job are left.
    """
    names = host_names(spec.nodes, spec.spares)
    head = names[-1]
    spec.directory.mkdir(parents=True, exist_ok=True)
    with network(names) as net, contextlib.closing(Hosts(net, spec.directory)) as hosts:
        for rank, host in enumerate((head, *names[:-1])):
            # What the coordinator's host logs is the job's log.
            logs = spec.directory if host == head else spec.directory / host
            place = (*hosts.place(host, head, rank=rank), "--log-dir", str(logs))
            hosts.start(host, spec.arguments(*place), spec.environment())
        deadline = time.monotonic() + spec.timeout_s
        watch = _Watch(spec, net, cuts)
        while hosts.launchers[head].poll() is None:
            watch.look()
            time.sleep(POLL_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job did not end within {spec.timeout_s:g} s; logs in {spec.logs}")
        apart = {cut.node for cut in cuts if not cut.heals}
        return _code(hosts, [head, *(name for name in names[:-1] if name not in apart)])


def _code(hosts: Hosts, names: Sequence[str]) -> int:
    codes = []
    for name in names:
        try:
            codes.append(hosts.launchers[name].wait(END_S))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job has ended, but {name}'s launcher does not within {END_S:g} s") from None
    return next((code for code in codes if code), 0)


class _Watch:
    """Cuts when it is time, and heals."""

    def __init__(self, spec: JobSpec, net: Network, cuts: Sequence[Cut]) -> None:
        self._spec = spec
        self._net = net
        self._due = list(cuts)
        self._done: list[tuple[Cut, float]] = []
        self._committed = -1
        self._events = Tail(spec.logs / "events.jsonl")

    def look(self) -> None:
        for event in self._events.lines():
            if event["event"] == "step_committed":
                self._committed = int(event["step"])
        for cut in [cut for cut in self._due if cut.step <= self._committed]:
            self._due.remove(cut)
            self._log(cut)
            cut.do(self._net)
            self._done.append((cut, time.monotonic()))
        for cut, began in [(cut, began) for cut, began in self._done if cut.heals]:
            by_time = cut.lasts_s and time.monotonic() >= began + cut.lasts_s
            by_steps = cut.lasts_steps and self._committed >= cut.step + cut.lasts_steps
            if by_time or by_steps:
                self._done.remove((cut, began))
                self._net.heal()

    def _log(self, cut: Cut) -> None:
        line = {
            "time": time.time(),
            "kind": cut.kind,
            "slot": None,
            "moment": None,
            "step": self._committed,
            "node": cut.node,
        }
        with self._spec.fault_log.open("a") as log:
            log.write(json.dumps(line) + "\n")
