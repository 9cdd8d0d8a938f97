"""Finding literals by their rarest triple finds the same ones as asking for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotswap.diagnosis.find import LONG, Finder

TEXTS = st.text("abcx ", max_size=60)


@given(st.sets(st.text("abcx ", min_size=3, max_size=6), max_size=20), TEXTS)
def test_the_same_as_asking_for_each(literals: set[str], text: str) -> None:
    assert sorted(Finder(literals).within(text)) == sorted(one for one in literals if one in text)
    longer = text + "-" * LONG
    assert sorted(Finder(literals).within(longer)) == sorted(one for one in literals if one in text)


@given(st.sets(st.binary(min_size=3, max_size=5), max_size=20), st.binary(max_size=40))
def test_bytes_as_well(literals: set[bytes], line: bytes) -> None:
    assert sorted(Finder(literals).within(line)) == sorted(one for one in literals if one in line)
