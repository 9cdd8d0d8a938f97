"""The handshake: who gets in, who does not, and what a recording is worth."""

from __future__ import annotations

import pytest

from hotswap.errors import AuthError, ProtocolError, UsageError
from hotswap.wire.auth import CHALLENGE_BYTES, HELLO_BYTES, MAGIC, PROOF_BYTES, Acceptor, Initiator

TOKEN = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


def test_both_sides_derive_the_same_keys_and_a_different_one_for_each_direction() -> None:
    initiator, acceptor = Initiator(TOKEN, "control"), Acceptor(TOKEN, "control")
    hello = initiator.hello()
    challenge = acceptor.challenge(hello)
    proof, ours = initiator.prove(challenge)
    theirs = acceptor.verify(proof)
    assert (len(hello), len(challenge), len(proof)) == (HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES)
    assert (ours.send, ours.receive) == (theirs.receive, theirs.send)
    assert ours.send != ours.receive


def test_two_connections_never_share_a_key() -> None:
    keys = set()
    for _ in range(5):
        initiator, acceptor = Initiator(TOKEN, "data"), Acceptor(TOKEN, "data")
        _, pair = initiator.prove(acceptor.challenge(initiator.hello()))
        keys |= {pair.send, pair.receive}
    assert len(keys) == 2 * 5


@pytest.mark.parametrize(("token", "purpose"), [(OTHER, "data"), (TOKEN, "control")])
def test_the_initiator_refuses_an_acceptor_of_another_job_or_channel(token: str, purpose: str) -> None:
    initiator = Initiator(TOKEN, "data")
    challenge = Acceptor(token, purpose).challenge(initiator.hello())
    with pytest.raises(AuthError, match="token"):
        initiator.prove(challenge)


def test_the_acceptor_refuses_a_guessed_proof() -> None:
    acceptor = Acceptor(TOKEN, "data")
    acceptor.challenge(Initiator(TOKEN, "data").hello())
    with pytest.raises(AuthError):
        acceptor.verify(bytes(PROOF_BYTES))


def test_a_recorded_proof_is_worth_nothing_on_the_next_connection() -> None:
    initiator, first = Initiator(TOKEN, "data"), Acceptor(TOKEN, "data")
    hello = initiator.hello()
    proof, _ = initiator.prove(first.challenge(hello))
    first.verify(proof)
    second = Acceptor(TOKEN, "data")
    second.challenge(hello)
    with pytest.raises(AuthError):
        second.verify(proof)


def test_a_recorded_challenge_does_not_fool_an_initiator() -> None:
    recorded = Acceptor(TOKEN, "data").challenge(Initiator(TOKEN, "data").hello())
    with pytest.raises(AuthError):
        Initiator(TOKEN, "data").prove(recorded)


def test_a_proof_cannot_be_reflected_to_its_author() -> None:
    acceptor = Acceptor(TOKEN, "data")
    challenge = acceptor.challenge(Initiator(TOKEN, "data").hello())
    with pytest.raises(AuthError):
        acceptor.verify(challenge[-PROOF_BYTES:])


@pytest.mark.parametrize("position", range(0, CHALLENGE_BYTES, 7))
def test_any_changed_bit_of_the_challenge_is_noticed(position: int) -> None:
    initiator = Initiator(TOKEN, "data")
    challenge = bytearray(Acceptor(TOKEN, "data").challenge(initiator.hello()))
    challenge[position] ^= 1
    with pytest.raises(AuthError):
        initiator.prove(bytes(challenge))


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n", MAGIC, bytes(HELLO_BYTES), MAGIC + bytes(33)])
def test_a_stranger_s_first_bytes_are_refused(hello: bytes) -> None:
    with pytest.raises(ProtocolError, match="same hotswap"):
        Acceptor(TOKEN, "data").challenge(hello)


def test_a_short_challenge_or_proof_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Initiator(TOKEN, "data").prove(b"short")
    acceptor = Acceptor(TOKEN, "data")
    acceptor.challenge(Initiator(TOKEN, "data").hello())
    with pytest.raises(AuthError):
        acceptor.verify(b"")


def test_a_guessable_token_is_refused_and_no_token_is_ever_shown() -> None:
    with pytest.raises(UsageError, match="token_hex"):
        Initiator("secret", "data")
    initiator, acceptor = Initiator(TOKEN, "data"), Acceptor(TOKEN, "data")
    _, keys = initiator.prove(acceptor.challenge(initiator.hello()))
    assert repr(keys) == "SessionKeys()"
