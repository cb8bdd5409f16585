"""A real PostgreSQL server for tests, from the machine's own programs, in a temporary folder, reached by a socket."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest


def programs() -> Path:
    """The folder of initdb and pg_ctl, or a skipped test."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))  # Debian's place
    if not folders or not (folders[-1] / "initdb").exists():
        pytest.skip("no PostgreSQL server programs (initdb, pg_ctl); on Debian: apt-get install postgresql")
    return folders[-1]


def server_user() -> str:
    """Who runs the server: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return getpass.getuser()
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        if shutil.which("runuser"):
            return name
    pytest.skip("PostgreSQL does not run as root, and there is no runuser with a user postgres or nobody here")


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def url(self, name: str) -> str:
        return f"postgresql://tester@/{name}?host={self.folder}"

    @contextmanager
    def database(self, name: str = "memory") -> Iterator[str]:
        """The URL of an empty database, dropped at the end: each one costs a thousand files."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
            try:
                yield self.url(name)
            finally:
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def serve() -> Iterator[Server]:
    """Initialise, start, yield, stop, remove."""
    bin_, user = programs(), server_user()
    # Not under pytest's folder, which is closed to other users; and short, as a socket's path must be.
    folder = Path(tempfile.mkdtemp(prefix="saga-pg-"))
    prefix = []
    if os.geteuid() == 0:
        shutil.chown(folder, user)
        prefix = ["runuser", "-u", user, "--"]

    def run(*command: str) -> None:
        subprocess.run([*prefix, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=120)

    data, log = str(folder / "data"), str(folder / "log")
    try:
        run(str(bin_ / "initdb"), "-D", data, "-U", "tester", "--auth=trust", "--no-sync", "-E", "UTF8")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run(str(bin_ / "pg_ctl"), "-D", data, "-l", log, "-w", "-o", options, "start")
        try:
            yield Server(folder)
        finally:
            run(str(bin_ / "pg_ctl"), "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
