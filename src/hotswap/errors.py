"""Everything hotswap raises on purpose, and whose fault it is.

HotswapError
├── UsageError            the caller: wrong option, wrong state, unsupported model       exit 2
│   └── UnsupportedState  the caller: a state_dict holds something that cannot travel
├── PeerFault             another process: recoverable, never ends this one
│   ├── Fenced            this generation is over; park and wait for the next one
│   └── PeerUnreachable   a connection to a peer broke or its deadline passed
├── IntegrityError        bytes that are not what they claim to be
│   └── LayoutMismatch    state of another shape than the one it should be loaded into
├── ProtocolError         a frame or message that must not be obeyed
│   └── AuthError         the other side does not know the job's token
└── RecoveryImpossible    no state left to go on from; the job must be requeued          exit 75
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USER_ERROR = 1
EXIT_USAGE = 2
EXIT_REQUEUE = 75
EXIT_DO_NOT_REQUEUE = 93


class HotswapError(Exception):
    """Base of all errors raised by hotswap."""


class UsageError(HotswapError):
    """The caller asked for something that cannot work; the message says what to do instead."""


class UnsupportedState(UsageError):
    """A ``state_dict`` holds a value that hotswap cannot move without pickling it."""


class PeerFault(HotswapError):
    """Another process failed. Recoverable: this process parks and is told how to go on."""


class Fenced(PeerFault):
    """The generation this process belonged to has ended."""


class PeerUnreachable(PeerFault):
    """A peer did not answer within its deadline, or closed the connection."""


class IntegrityError(HotswapError):
    """Bytes failed their checksum or claim another step, slot or length than was asked for."""


class LayoutMismatch(IntegrityError):
    """Saved state has another layout than the live objects it should be loaded into."""


class ProtocolError(HotswapError):
    """A malformed, oversized, unknown or out-of-order message."""


class AuthError(ProtocolError):
    """The peer could not prove that it knows the job's token."""


class RecoveryImpossible(HotswapError):
    """Every copy of some slot's state is gone and there is no durable checkpoint."""
