"""One grep that is asked block after block: starting it takes longer than letting it read four million bytes.

grep answers while it is still being written to, so both pipes are served at once. A line that occurs nowhere else is sent after
each block; when it comes back, all lines before it have been answered.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import shutil
import subprocess

PIPE_BYTES = 1 << 20
"""Asked of the system (which may say no) for the way to grep: the larger, the fewer changes between two processes."""
ANSWER_SECONDS = 60.0
"""Without a byte taken or given for so long, grep is given up."""
_PLAIN = {"LC_ALL": "C"}


def grep_command() -> tuple[bytes, ...] | None:
    """GNU grep, or one that does the same; None where there is none, or it does not do what it should."""
    path = shutil.which("grep")
    if path is None:
        return None
    command = (os.fsencode(path), b"-a", b"-E", b"--line-buffered", b"-b")
    try:
        trial = (*command, b"-e", b"x|\\[y")
        done = subprocess.run(trial, input=b"\xff[y\nz\n", capture_output=True, check=False, env=_PLAIN, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if done.stdout == b"0:\xff[y\n" else None


class Sieve:
    """Lets through the lines that contain one of the literals."""

    def __init__(self, command: tuple[bytes, ...], literals: tuple[bytes, ...]) -> None:
        """Starts *command*, as :func:`grep_command` gives it. Must be closed."""
        self._mark = os.urandom(16).hex().encode()
        pattern = b"|".join(re.sub(rb"([][\\.*^$+?(){}|])", rb"\\\1", literal) for literal in (*literals, self._mark))
        self._process = subprocess.Popen(
            (*command, b"-e", pattern),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_PLAIN,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._to, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._sent = 0

    def lines(self, block: bytes) -> list[tuple[int, bytes]]:
        """(offset in *block*, the line without its newline) of each that is let through.

        Raises:
            OSError: grep ended, or did not answer.
        """
        start = self._sent
        end = (b"" if block.endswith(b"\n") else b"\n") + self._mark + b"\n"
        self._sent += len(block) + len(end)
        found = []
        for answer in self._answer(block, end).split(b"\n")[:-2]:
            place, _, line = answer.partition(b":")
            found.append((int(place) - start, line))
        return found

    def _answer(self, *parts: bytes) -> bytes:
        """What grep says to *parts*, up to the mark in the last one."""
        unsent = [memoryview(part) for part in reversed(parts)]
        answer = bytearray()
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._from, selectors.EVENT_READ)
            pipes.register(self._to, selectors.EVENT_WRITE)
            while not answer.endswith(self._mark + b"\n"):
                ready = {key.fd for key, _ in pipes.select(ANSWER_SECONDS)}
                if not ready:
                    raise OSError(f"grep took and gave nothing for {ANSWER_SECONDS:.0f} seconds")
                if self._from in ready:
                    answer += self._read()
                if self._to in ready and not self._write(unsent):
                    pipes.unregister(self._to)
        return bytes(answer)

    def _read(self) -> bytes:
        if some := os.read(self._from, PIPE_BYTES):
            return some
        self._process.kill()
        _, said = self._process.communicate()
        raise OSError(f"grep ended with {self._process.returncode}: {said[:200].decode('utf-8', 'replace')}")

    def _write(self, unsent: list[memoryview]) -> bool:
        """Whether there is still something to be sent. The next part is the last one in the list."""
        try:
            unsent[-1] = unsent[-1][os.write(self._to, unsent[-1]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False  # Its end is read from the other pipe.
        if not unsent[-1]:
            unsent.pop()
        return bool(unsent)

    def close(self) -> None:
        """Ends grep."""
        self._process.kill()
        self._process.communicate()
