"""The program of a process that compiles grammars on trial, and ends if one needs too much.

It imports nothing of this package, so that it starts in a tenth of a second. Standard input has
messages of JSON, each after its length: first what `main` needs, then one grammar in llguidance's
notation at a time. The answer is one byte, whether the grammar is valid or not. A grammar that
takes more than its processor time ends the process by SIGPROF, however busy the machine is.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import threading
from typing import Any

_STACK_BYTES = 64 << 20
_NICENESS = 10


class _Outline:
    """A vocabulary of one byte per token, whose control tokens have their names and numbers.

    Whether a grammar compiles, and at what cost, depends on no other tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, control: dict[int, str], eos_token_id: int):
        plain = [token for token in range(size) if token not in control][:256]
        self._by_byte = dict(enumerate(plain))
        self.tokens = [b""] * max(size, eos_token_id + 1)
        for byte, token in self._by_byte.items():
            self.tokens[token] = bytes([byte])
        for token, name in control.items():
            self.tokens[token] = name.encode()
        self.special_token_ids = sorted(control)
        self.eos_token_id = eos_token_id

    def __call__(self, text: str) -> list[int]:
        return [self._by_byte[byte] for byte in text.encode() if byte in self._by_byte]


def main() -> None:
    """Compile grammars until standard input ends."""
    os.nice(_NICENESS)
    package: Any = importlib.import_module("llguidance")
    size, control, eos_token_id, bounds, most_bytes, most_cpu_s, idle_s = _read()
    names = {int(token): name for token, name in control.items()}
    vocabulary = package.LLTokenizer(_Outline(size, names, eos_token_id))
    limits = package.LLParserLimits(**bounds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    while select.select([sys.stdin], [], [], idle_s)[0]:
        grammar = _read()
        if grammar is None:
            return
        signal.setitimer(signal.ITIMER_PROF, most_cpu_s)
        matcher = package.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        os.write(sys.stdout.fileno(), b".")


def _read() -> Any:
    head = _read_bytes(8)
    return json.loads(_read_bytes(*struct.unpack("<q", head))) if head else None


def _read_bytes(count: int) -> bytes:
    """Read from the descriptor itself, as `select` does not know what a buffer holds."""
    parts = []
    while count:
        part = os.read(sys.stdin.fileno(), count)
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    has_failed = [True]

    def _run() -> None:
        main()
        has_failed[0] = False

    threading.stack_size(_STACK_BYTES)
    _thread = threading.Thread(target=_run)
    _thread.start()
    _thread.join()
    sys.exit(has_failed[0])
