from __future__ import annotations

import subprocess
import sys
import time

from hotswap.demo import corpus


def test_both_splits_are_there_and_bounded() -> None:
    text = corpus.load()
    assert corpus.TRAIN_BYTES_MAX // 2 < len(text.train) <= corpus.TRAIN_BYTES_MAX
    assert corpus.HELD_OUT_BYTES_MAX // 2 < len(text.held_out) <= corpus.HELD_OUT_BYTES_MAX


def test_it_is_python_source() -> None:
    text = corpus.load()
    assert text.train.count(b"\n    def ") > 100
    assert text.held_out.count(b"def ") > 10


def test_held_out_text_is_not_trained_on() -> None:
    text = corpus.load()
    pieces = [text.held_out[at : at + 200] for at in range(0, len(text.held_out) - 200, 2000)]
    assert not [piece for piece in pieces if piece in text.train]


def test_another_process_reads_the_same_text() -> None:
    program = "from hotswap.demo import corpus; print(corpus.load().fingerprint())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == corpus.load().fingerprint()


def test_reading_is_quick() -> None:
    corpus.load.cache_clear()
    start = time.process_time()
    corpus.load()
    assert time.process_time() - start < 0.3


def test_the_split_follows_the_name_alone() -> None:
    names = [f"module{number}.py" for number in range(1200)]
    held_out = [name for name in names if corpus.is_held_out(name)]
    assert held_out == [name for name in names if corpus.is_held_out(name)]
    assert 50 < len(held_out) < 200
