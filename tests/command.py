"""The command line in this process, as a user types it."""

from __future__ import annotations

import sys

import pytest

from train.cli import main


def saga(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The exit code of ``saga ARGS…``."""
    monkeypatch.setattr(sys, "argv", ["saga", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What ``saga ARGS…`` says of a user's mistake: one line, with exit code 2."""
    assert saga(monkeypatch, *args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    return error
