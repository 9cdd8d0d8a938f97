"""What a job takes and survives, against numbers worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hotswap.errors import UsageError
from hotswap.planning.budget import FIXED_NBYTES, GROWTH, Job, Loss, budget, expand, state_nbytes
from hotswap.planning.cli import main


def job(**fields: Any) -> Job:
    return Job(**{"nodes": 4, "width": 2, "replicas": 1, "shared_nbytes": 0, "unique_nbytes": 1000, **fields})


def losses(of: Job) -> dict[str, bool]:
    return {loss.what: loss.survivable for loss in budget(of).losses}


def test_a_slots_share_of_the_state() -> None:
    sizes = {"slots": 16, "model_parallel": 4, "state_bytes": 12.0}
    assert state_nbytes(1600, sharding="none", **sizes) == (4800, FIXED_NBYTES)  # type: ignore[arg-type]
    assert state_nbytes(1600, sharding="full", **sizes) == (0, 1200 + FIXED_NBYTES)  # type: ignore[arg-type]
    alone = state_nbytes(1600, sharding="none", slots=4, model_parallel=4, state_bytes=12.0)
    assert alone == (0, 4800 + FIXED_NBYTES), "without data-parallel peers nobody else has it"
    with pytest.raises(UsageError, match="no sharding 'half'"):
        state_nbytes(1, sharding="half", **sizes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="groups of 3"):
        state_nbytes(1, sharding="none", slots=16, model_parallel=3, state_bytes=12)


def test_memory_and_link_of_a_node() -> None:
    plain = budget(job())
    assert plain.snapshot_nbytes == 2 * 2 * int(GROWTH * 1000)
    assert plain.replica_nbytes == 2 * 2 * 1000, "two slots' replicas, two versions"
    assert plain.link_s == pytest.approx(2000 / 12.5e9)
    assert (plain.replicas, plain.tolerates) == (1, 1)
    more = budget(job(replicas=2, checkpoints=True, integrity=True, snapshot_interval=4, link_bytes_s=1000.0))
    assert more.snapshot_nbytes == 2 * 4 * int(GROWTH * 1000)
    assert more.replica_nbytes == 4 * 3 * 1000
    assert (more.link_s, more.link_s_per_step, more.restore_s) == (4.0, 1.0, 2.0)
    assert (more.replicas, more.tolerates) == (2, 2)


def test_losses_are_looked_at_up_to_the_first_that_is_too_much() -> None:
    assert losses(job()) == {"any node": True, "any 2 nodes at once": False}
    (_, two) = budget(job()).losses
    assert two == Loss(
        what="any 2 nodes at once",
        survivable=False,
        fatal=(("node0", "node1"), ("node0", "node3"), ("node1", "node2")),
    )
    assert losses(job(replicas=2)) == {
        "any node": True,
        "any 2 nodes at once": True,
        "any 3 nodes at once": False,
    }
    assert losses(job(nodes=1)) == {"any node": False}
    assert list(losses(job(nodes=1000, width=1))) == ["any node"], "what cannot be looked at is not promised"


def test_racks() -> None:
    racks = ("rack=a", "rack=a", "rack=b", "rack=b")
    assert losses(job(domains=racks))["all of rack=a (2 nodes)"]
    one = budget(job(domains=("rack=a",) * 4)).losses[-1]
    assert one.what == "all of rack=a (4 nodes)" and one.fatal == (("node0", "node1", "node2", "node3"),)


def test_labels_of_many_nodes() -> None:
    assert expand(["rack=a,pdu=1*2", "rack=b"]) == ("rack=a,pdu=1", "rack=a,pdu=1", "rack=b")
    for wrong in ("rack=a*many", "*3", " , "):
        with pytest.raises(UsageError, match="--fault-domain"):
            expand([wrong])
    with pytest.raises(UsageError, match="3 fault domains for 4 nodes"):
        job(domains=("a",) * 3)
    with pytest.raises(UsageError, match="at least 1"):
        job(replicas=0)


ARGUMENTS = ("--nnodes", "4", "--nproc-per-node", "8", "--parameters", "70b", "--model-parallel", "8")


def test_the_command_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--fault-domain", "rack=a*2", "--fault-domain", "rack=b*2", "--step-s", "10"]) == 0
    out = capsys.readouterr().out
    assert "4 nodes of 8; a slot has 0 KiB that peers have too, 24.45 GiB alone" in out
    assert "snapshots 488.95 GiB, replicas of others 782.31 GiB" in out, out
    assert "survives the loss of any node\n" in out
    assert "DOES NOT SURVIVE the loss of any 2 nodes at once: not node0 with node2 or" in out
    assert "survives the loss of all of rack=b (2 nodes)\n" in out
    assert main([*ARGUMENTS, "--replicas", "9"]) == 0
    assert "replicas                3, not 9" in capsys.readouterr().out


def test_the_command_says_it_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--replicas", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["replicas"], found["tolerates"], found["shared_nbytes"]) == (2, 2, 0)
    assert [loss["survivable"] for loss in found["losses"]] == [True, True, False]


@pytest.mark.parametrize("wrong", ["seven", "0", ""])
def test_a_number_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="--parameters"):
        main([*ARGUMENTS[:4], "--parameters", wrong])
