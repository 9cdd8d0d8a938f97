"""What an exception means by its name, its message and the place where it stands."""

from __future__ import annotations

import pytest

from hotswap.diagnosis import Evidence, diagnose
from hotswap.diagnosis.exceptions import family
from hotswap.diagnosis.readers import read_text


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("RuntimeError", "training diverged after step 7", "numbers"),
        ("Exception", "grad norm is nan", "numbers"),
        ("RuntimeError", "Loss was NaN in 3 steps on end", "numbers"),
        ("RuntimeError", "nans in the values of layer 7", "numbers"),
        ("RuntimeError", "the device has not enough memory: OOM on GPU 3", "device-memory"),
        ("RuntimeError", "out of host memory while reading shard 4", "memory"),
        ("OSError", "shard 12 appears to be truncated", "storage"),
        ("RuntimeError", "checksum of block 9 differs", "storage"),
        ("DriverError", "the card fell off the bus", "hardware"),
        ("RuntimeError", "node tpu-7 is not ready", "hardware"),
        ("OSError", "timed out trying to reach depot.local", "network"),
        ("InternalServerError", "please try again", "network"),
        ("RuntimeError", "sample 6: transfer not completed, 12 of 90 bytes", "network"),
        ("RuntimeError", "sample 6 failed: <ClientPayloadError: 9 bytes short>", "network"),
        ("RuntimeError", "sample 6 failed with KeyError in the loader", "program"),
        ("RuntimeError", "failed to connect to rank 3", "echo"),
        ("RuntimeError", "timed out waiting for response of worker 5", "echo"),
        ("RuntimeError", "access denied for bucket b", "program"),
        ("KeyError", "'disk is full'", "program"),
        ("AssertionError", "device 9 is missing", "program"),
        ("ValueError", "unknown optimizer", "program"),
        ("RuntimeError", "frobnicator closed", "other"),
    ],
)
def test_family(name: str, message: str, expected: str) -> None:
    assert family(name, message) == expected


def _exceptions(text: str) -> list[Evidence]:
    return [one for one in read_text(text) if one.kind == "exception"]


def test_a_bare_exception_counts_if_it_says_something() -> None:
    (found,) = _exceptions("Exception: the shard list is empty")
    assert found.facts["type"] == "Exception"
    assert not _exceptions("Exception:")
    assert not _exceptions("Exception in thread loader")


def test_what_ends_a_traceback_is_an_exception_whatever_its_name() -> None:
    text = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
    load()
BadChunk: 17
all done"""
    (found,) = _exceptions(text)
    assert found.facts["type"] == "BadChunk"
    assert not _exceptions("BadChunk: 17")


def test_tracebacks_of_ranks_that_print_into_one_stream_are_told_apart() -> None:
    text = """[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "train.py", line 7, in <module>
[rank1]:   File "train.py", line 7, in <module>
[rank0]:     load()
[rank1]:     load()
[rank0]: shards.BadChunk
[rank1]: shards.BadChunk
epoch: 3"""
    assert [(one.rank, one.facts["type"]) for one in _exceptions(text)] == [(0, "BadChunk"), (1, "BadChunk")]


def test_an_exception_of_a_thread_beside_the_program_decides_little() -> None:
    main = """Traceback (most recent call last):
  File "train.py", line 7, in <module>
KeyError: 'loss'"""
    assert diagnose(read_text(main)).confident
    beside = diagnose(read_text("Exception in thread Thread-4 (pulse):\n" + main))
    assert beside.rules[0] == "python.background"
    assert not beside.confident


def test_an_end_of_file_means_a_file_or_another_process() -> None:
    frames = """Traceback (most recent call last):
  File "{}", line 7, in load
EOFError: Ran out of input"""
    assert diagnose(read_text(frames.format("/env/torch/serialization.py"))).rules[0] == "storage.checkpoint-damaged"
    elsewhere = diagnose(read_text(frames.format("/usr/lib/multiprocessing/spawn.py")))
    assert "python.pipe-gone" in elsewhere.echo_rules
    assert not elsewhere.confident


def test_a_class_with_its_module_is_an_exception_without_a_traceback() -> None:
    (found,) = _exceptions("io.UnsupportedOperation: fileno")
    assert found.facts["family"] == "program"
    assert not _exceptions("hydra.core.Plugins are loaded")


def test_many_streams_are_followed_in_bounded_memory() -> None:
    lines = [f"[rank{rank}]: Traceback (most recent call last):" for rank in range(5000)]
    assert len(read_text("\n".join(lines))) > 0
