"""The process that evaluates predicates. It can be killed at any moment, and is.

Run as a script by :class:`memory.predicates.PredicateHost`; it imports nothing but the standard library and cel. A
request on standard input is a length (4 bytes, big endian) and JSON::

    {"sources": [CEL that yields 0, 1 or 2], "names": [what they read], "history": [entry], "stream": bool,
     "seconds": float, "steps": [{"set": {name: value}, "push": entry or null}]}

The steps share one context: ``set`` changes its variables, and ``push`` adds to the history after the step. The answer
holds, per step and source, ``0`` (idle), ``1`` (followed), ``2`` (violated), ``s`` (not begun: the time was over) or
``e`` (raised) with a message up to a line end: in pieces or, streamed, one by one (so that the host sees which one
hangs) after a ``b`` (begun).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import types
from typing import Any

MEMORY_BYTES = 2 << 30
"""Address space of the process."""
ORPHAN_SECONDS = 5.0
"""Time after its allowance at which the process ends itself: its host, which should have killed it, is gone."""
ANSWER_BYTES = 4096
HISTORY = 50


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # cel imports its command line (typer, rich, prompt toolkit: half a second), of which nothing is used here.
    sys.modules["cel.cli"] = types.ModuleType("cel.cli")
    import cel

    programs: dict[str, Any] = {}
    os.write(1, b"r")
    while header := _read(4):
        request = json.loads(_read(int.from_bytes(header, "big")))
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + ORPHAN_SECONDS)
        _answer(request, programs, cel)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(request: dict[str, Any], programs: dict[str, Any], cel: Any) -> None:
    end = time.monotonic() + request["seconds"]
    history = request["history"]
    context = cel.Context()
    wanted = set(request["names"])
    if "history" in wanted:
        context.add_variable("history", history)
    if request["stream"]:
        os.write(1, b"b")
    answer = b""
    for step in request["steps"]:
        for name, value in step["set"].items():
            context.add_variable(name, value)
        for source in request["sources"]:
            result = _evaluate(source, programs, context, cel) if time.monotonic() < end else b"s"
            if request["stream"]:
                os.write(1, result)
            else:
                answer += result
        if len(answer) > ANSWER_BYTES:
            os.write(1, answer)
            answer = b""
        if step["push"] is not None:
            history = [*history, step["push"]][-HISTORY:]
            if "history" in wanted:
                context.add_variable("history", history)
    os.write(1, answer)


def _evaluate(source: str, programs: dict[str, Any], context: Any, cel: Any) -> bytes:
    try:
        if source not in programs:
            if len(programs) > 10_000:
                programs.clear()
            programs[source] = cel.compile(source)
        result = programs[source].execute(context)
    except Exception as error:  # whatever cel raises is the predicate's error, and is reported as that
        return b"e" + " ".join(f"{type(error).__name__}: {error}".split())[:300].encode(errors="replace") + b"\n"
    return b"%d" % result


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            return b""
        data += piece
    return data


if __name__ == "__main__":
    main()
