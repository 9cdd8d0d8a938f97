"""Flags that ``hotswap run`` shares with the commands of the control plane: the token, the store, what is decided by. No torch here."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeVar

from hotswap.config import StoreConfig
from hotswap.core.limits import SLOW_RATIO
from hotswap.errors import UsageError
from hotswap.store.open import configured
from hotswap.wire.auth import TOKEN_BYTES_MIN

TOKEN = "HOTSWAP_TOKEN"
ETCD_USER, ETCD_PASSWORD = "HOTSWAP_ETCD_USER", "HOTSWAP_ETCD_PASSWORD"
N = TypeVar("N", int, float)
REBUILDS = ("touched", "all")
SECRETS = (TOKEN, ETCD_USER, ETCD_PASSWORD)
"""Environment variables that a job's processes must not inherit: the user's script can read theirs."""


def add_store_flags(group: argparse._ActionsContainer) -> None:
    """Where several coordinators agree on which one leads."""
    group.add_argument(
        "--store",
        default="",
        metavar="URL",
        help="where several coordinators agree on which one leads: etcd://H:P,H:P,H:P, etcds://... (TLS), or tcp://H:P (hotswap "
        f"store); etcd's user and password are read from {ETCD_USER} and {ETCD_PASSWORD}",
    )
    group.add_argument("--store-ca", default="", metavar="FILE", help="certificate authority of etcds://")
    group.add_argument("--store-cert", default="", metavar="FILE", help="this client's certificate for etcds://")
    group.add_argument("--store-key", default="", metavar="FILE", help="this client's key for etcds://")


def store_of(args: argparse.Namespace) -> StoreConfig | None:
    """What the flags and the environment say; None without a store."""
    files = {"ca": args.store_ca, "cert": args.store_cert, "key": args.store_key}
    if not args.store:
        if any(files.values()):
            raise UsageError("--store-ca, --store-cert and --store-key need --store")
        return None
    for flag, path in files.items():
        if path and not os.access(path, os.R_OK):
            raise UsageError(f"--store-{flag} {path} cannot be read")
    user, password = os.environ.get(ETCD_USER, ""), os.environ.get(ETCD_PASSWORD, "")
    if args.store.startswith("tcp:"):
        user = password = ""
    paths = {flag: str(Path(path).resolve()) if path else "" for flag, path in files.items()}
    return configured(args.store, user=user, password=password, **paths)


def add_policy_flags(group: argparse._ActionsContainer) -> None:
    """What the coordinator decides by, wherever it runs."""
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="K",
        help="nodes that keep a copy of each snapshot, beside its owner: so many nodes may be lost at the same time",
    )
    group.add_argument(
        "--evict-slow",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="give up the node of a worker whose own part of a step takes so many times as long as that of its peers, if there is "
        "a spare; 0: slow workers are only told",
    )
    group.add_argument(
        "--rebuild",
        choices=REBUILDS,
        default=REBUILDS[0],
        help="which process groups a recovery forms anew: those that a loss has touched, or all, which takes longer and shows whether a "
        "group that was kept is at fault",
    )
    group.add_argument(
        "--min-nodes",
        type=int,
        default=0,
        metavar="M",
        help="go on with fewer nodes, M at least, if none comes within --spare-wait-s: the largest part of the nodes that are left "
        "that divides their number, from the newest state in --checkpoint-dir, and with more again as they come; 0: never",
    )


def at_least(flag: str, value: N, least: N) -> N:
    """*value*; UsageError if it is less than *least*, or no number."""
    if not value >= least:
        raise UsageError(f"{flag} is {value}, and must be at least {least}")
    return value


def evict_slow(ratio: float) -> float:
    """*ratio*; UsageError if it is so small that nobody is safe."""
    if not (ratio == 0 or ratio >= SLOW_RATIO):
        raise UsageError(
            f"--evict-slow {ratio:g}: at least {SLOW_RATIO:g} times as long counts as slow; 0 never evicts"
        )
    return ratio


def min_nodes(least: int, active: int, *, storage: bool) -> int:
    """With how many of *active* nodes a job may still go on. UsageError if it never could."""
    if least == 0:
        return 0
    if active == 1:
        raise UsageError(f"--min-nodes {least}: a job of one node has no fewer; leave it out")
    if not 1 <= least < active:
        raise UsageError(f"--min-nodes {least}: say a number from 1 to {active - 1}, less than the {active} that train")
    if all(active % fewer for fewer in range(least, active)):
        raise UsageError(
            f"--min-nodes {least}: no number of nodes from {least} to {active - 1} divides the {active} that train, so the global "
            "batch could not be kept; say less, or start with another number"
        )
    if not storage:
        raise UsageError("--min-nodes needs --checkpoint-dir: a smaller job goes on from what is there")
    return least


def add_token_flag(group: argparse._ActionsContainer) -> None:
    """Never the token itself, which every user of a machine could read there."""
    group.add_argument(
        "--token-file", default="", help="file with the job's token, the same on every node (or set HOTSWAP_TOKEN)"
    )


def add_inject_flag(group: argparse._ActionsContainer) -> None:
    """Off unless asked for: whoever has the token could end a job of weeks."""
    group.add_argument(
        "--allow-inject",
        action="store_true",
        help="obey 'hotswap inject', which strikes processes of this job for drills; it needs the job's token",
    )


def token_of(path: str) -> str:
    """The token in the file at *path*, or else in the environment; empty if there is none."""
    source, token = f"${TOKEN}", os.environ.get(TOKEN, "")
    if path:
        source = f"--token-file {path}"
        try:
            mode = os.stat(path).st_mode & 0o077
            token = Path(path).read_text().strip()
        except OSError as error:
            raise UsageError(f"--token-file: {error}") from None
        if mode:
            raise UsageError(f"{source} can be read by others: chmod 600 it")
    if (path or token) and len(token.encode()) < TOKEN_BYTES_MIN:
        raise UsageError(f"{source}: the token has fewer than {TOKEN_BYTES_MIN} bytes")
    return token


def required_token(path: str) -> str:
    """As ``token_of``, for processes that cannot make one up."""
    token = token_of(path)
    if not token:
        raise UsageError("the job's token is needed: --token-file FILE, or set HOTSWAP_TOKEN")
    return token


def addresses_of(flag: str, text: str, default_port: str) -> tuple[str, ...]:
    """``HOST:PORT,HOST:PORT`` in its parts, each with a port."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if text and not found:
        raise UsageError(f"{flag} {text!r}: HOST:PORT, or several of them with commas between them")
    return tuple(part if part.rpartition(":")[0] else f"{part}:{default_port}" for part in found)
