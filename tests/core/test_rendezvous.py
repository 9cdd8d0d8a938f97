from __future__ import annotations

import pytest

from hotswap.core import rendezvous
from hotswap.core.rendezvous import RendezvousTable


def table() -> RendezvousTable[str]:
    made: RendezvousTable[str] = RendezvousTable()
    made.advance(2)
    return made


def test_a_value_is_given_to_all_who_wait_and_all_who_ask_later() -> None:
    keys = table()
    assert keys.get(2, "k", "a") is None
    assert keys.get(2, "k", "b") is None
    assert keys.set(2, "k", b"v") == ["a", "b"]
    assert keys.set(2, "k", b"w") == []
    assert keys.get(2, "k", "c") == b"w"


@pytest.mark.parametrize("generation", [1, 3])
def test_only_the_present_generation_is_served(generation: int) -> None:
    keys = table()
    assert keys.set(generation, "k", b"v") == []
    assert keys.get(2, "k", "a") is None
    keys.set(2, "k", b"v")
    assert keys.get(generation, "k", "a") is None


def test_a_new_generation_forgets_values_and_waiters() -> None:
    keys = table()
    keys.set(2, "k", b"v")
    keys.get(2, "other", "a")
    keys.advance(2)
    assert keys.get(2, "k", "a") == b"v"
    keys.advance(3)
    assert keys.get(3, "k", "b") is None
    assert keys.set(3, "other", b"v") == []
    keys.advance(1)
    assert keys.generation == 3


def test_the_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "KEYS_MAX", 1)
    keys = table()
    keys.set(2, "k", b"v")
    with pytest.raises(AssertionError, match="1 keys"):
        keys.set(2, "l", b"v")
