"""What the name of a Python exception says: whether the program is wrong, a peer is gone, or something outside did not answer.

Only the names of the most common exceptions are listed. Libraries name theirs after the same words, so the rest is decided by
what a name is made of; what neither tells is ``other``. A name that may stand for anything (:data:`_NEUTRAL`) says less than
its message does, so that is read first.
"""

from __future__ import annotations

import re

from hotswap.diagnosis.phrases import said

_KNOWN: dict[str, str] = {
    **dict.fromkeys(("KeyboardInterrupt",), "person"),
    **dict.fromkeys(("FloatingPointError", "NonFiniteLossError", "NanInfException"), "numbers"),
    **dict.fromkeys(("MemoryError",), "memory"),
    **dict.fromkeys(
        ("UnpicklingError", "BlockingIOError", "SafetensorError", "struct.error", "zlib.error", "lmdb.Error", "BadZipFile"),
        "storage",
    ),
    **dict.fromkeys(("cv2.error", "re.error", "binascii.Error", "configparser.Error", "shutil.Error"), "program"),
    **dict.fromkeys(("BrokenProcessPool",), "echo"),
    **dict.fromkeys(("OSError", "IOError", "EnvironmentError"), "system"),
    # The program itself, its input or its configuration.
    **dict.fromkeys(
        (
            "ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "NameError", "AssertionError",
            "ImportError", "ModuleNotFoundError", "NotImplementedError", "ZeroDivisionError", "SyntaxError",
            "IndentationError", "RecursionError", "UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError",
            "FileNotFoundError", "FileExistsError", "PermissionError", "IsADirectoryError", "NotADirectoryError",
            "JSONDecodeError", "ValidationError", "OverflowError", "LookupError", "ArithmeticError", "PicklingError",
            "ZeRORuntimeException", "StopIterationError", "CompilationError", "BackendCompilerFailedError",
        ),
        "program",
    ),
    # Something outside the process did not answer.
    **dict.fromkeys(
        (
            "TimeoutError", "ReadTimeout", "ConnectTimeout", "ConnectionError", "ReadTimeoutError", "ConnectTimeoutError",
            "MaxRetryError", "NewConnectionError", "ProtocolError", "ChunkedEncodingError", "SSLError", "SSLEOFError",
            "ProxyError", "ClientConnectorError", "ClientPayloadError", "ClientOSError", "ServerDisconnectedError",
            "HTTPError", "HfHubHTTPError", "CommError", "RetryError", "LocalEntryNotFoundError", "URLError",
        ),
        "network",
    ),
    # Somebody else is gone, or this one only passes on what another process said.
    **dict.fromkeys(
        (
            "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError", "EOFError",
            "DistNetworkError", "DistStoreError", "DistBackendError", "DistError", "RendezvousError",
            "RendezvousConnectionError", "RendezvousTimeoutError", "RendezvousStateError", "ChildFailedError",
            "CalledProcessError", "ProcessExitedException", "ProcessRaisedException", "RayTaskError", "RayActorError",
            "ActorDiedError", "ActorUnavailableError", "ActorHandleNotFoundError", "TuneError", "TrainingFailedError",
            "ExecuteUserScriptError", "WorkflowError", "SystemExit", "SignalException", "HorovodInternalError",
            "UncompletedJobError", "XlaRuntimeError",
        ),
        "echo",
    ),
}  # fmt: skip
NAMES = frozenset(_KNOWN)
"""The names that are listed."""

_BY_WORD: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "echo",
        re.compile(
            r"Died|Dead|Lost|Crash|Killed|Abort|Cancel|Exited|Closed|Rendezvous|Worker|Actor|Job(?:Error|Exc)|Interrupt"
        ),
    ),
    (
        "network",
        re.compile(r"Timeout|TimedOut|Connect|Unavailable|Network|Disconnect|Throttl|HTTP|Http|Socket|TooMany"),
    ),
    ("memory", re.compile(r"ArrayMemory|HostMemory")),
    ("storage", re.compile(r"Corrupt|Checksum|Truncat|DataLoss")),
    ("numbers", re.compile(r"NaN|Nan[A-Z]|NonFinite|Infinite")),
    (
        "program",
        re.compile(
            r"Config|Argument|Param|Validation|Schema|Pars|Syntax|Type|Value|Key|Index|Attribute|NotFound|Missing|Invalid"
            r"|Unsupported|NotSupported|Unimplement|Mismatch|Shape|Compil|Lower|Dynamo|Inductor|Decod|Encod|Import|Usage"
            r"|Misconfig|Permission|Denied|Template|Token|Dataset|Hydra|Omega|Duplicate|Assert|Resource"
        ),
    ),
)

_NEUTRAL = re.compile(
    r"^(?:RuntimeError|Exception|BaseException|Error|ValueError|AssertionError|OSError|IOError|EnvironmentError|C\+\+|Warning"
    r"|\w*(?:Runtime|Internal|System|Backend|Driver|Support|Unknown|Fatal|Critical|Task|Training|Execution|Service|Client|Server)\w*"
    r"(?:Error|Exception))$"
)
"""Names that libraries use for whatever goes wrong."""
_WAITED = re.compile(
    r"[Tt]imed? ?out|[Tt]imeout|[Cc]onnection|[Ss]ocket|\bpeer\b|[Aa]borted|NCCL|HCCL|RCCL|[Ww]atchdog|[Dd]eadline|CUDA error|HIP error"
    r"|[Ee]ngine|[Ww]orkers? .{0,40}(?:died|failed|exited)|[Ss]ee (?:the )?(?:root|stack|above|log)|terminated|exited unexpectedly"
)
_JUDGES = ("ValueError", "AssertionError")
"""With these the program complains about what it was given; talk of a device in them is talk of a setting."""
_NUMBERS = re.compile(r"\b(?:NaN|nan|inf(?:inity)?|non-finite)\b")
_ERRNO = re.compile(r"\[Errno \d+\]")
_NAMED_INSIDE = re.compile(r"\b([A-Z]\w+(?:Error|Exception))\b")


def family(name: str, message: str) -> str:
    """One of ``program``, ``network``, ``echo``, ``memory``, ``device-memory``, ``storage``, ``hardware``, ``numbers``, ``person``,
    ``other``."""
    found = _KNOWN.get(name) or next((kind for kind, words in _BY_WORD if words.search(name)), "other")
    if name in ("OverflowError", "ValueError") and _NUMBERS.search(message):
        return "numbers"
    if (found == "other" or _NEUTRAL.match(name)) and (meant := said(message)):
        if meant != "refused" and not (meant == "hardware" and name in _JUDGES):
            return meant
        found = "program" if found in ("other", "system", "network") else found
    elif (
        _NEUTRAL.match(name) and name not in _JUDGES
    ):  # Libraries put what they caught into the text of what they raise.
        inside = (_KNOWN[inner] for inner in _NAMED_INSIDE.findall(message) if inner in _KNOWN)
        found = next(inside, found)
    if found == "system":
        return "storage" if _ERRNO.search(message) else "program" if message else "other"
    if found == "other" and _WAITED.search(message):
        return "echo"
    return found
