"""``saga browse`` and the report in a real browser: clicked from a principle down to a raw step and back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from memory.store import Store
from tests.browser import NAMES, Tab, find_chromium
from tests.chronicle import NAME, PRINCIPLE, PROCEDURE, played, write_run
from tests.unit.test_compare import evaluation, item
from tests.vault import episode
from train.ingest import trajectory_of
from train.report import write_report

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TRAJECTORY = trajectory_of(played(0), NAME).id
EPISODE = episode(trajectory_of(played(0), NAME)).id


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    found = find_chromium()
    if found is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on PATH, and the variable CHROMIUM is not set")
    tab = Tab(found, tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


@pytest.fixture
def tab(chromium: Tab) -> Tab:
    """An empty page on a desktop, of which nothing has been heard yet."""
    chromium.go("about:blank")
    chromium.size(1200)
    chromium.media()
    chromium.errors.clear()
    chromium.requests.clear()
    return chromium


@pytest.fixture(scope="module")
def site(run: Path) -> Iterator[str]:
    """The address of `saga browse RUN`, started as a user does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "train.cli", "browse", str(run), "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            address = f"http://127.0.0.1:{port}"
            assert said == f"{address}  (Ctrl-C ends it)\n"
            until = time.monotonic() + 60
            while time.monotonic() < until:
                try:
                    assert httpx.get(address).status_code == 200
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield address
        finally:
            server.terminate()


def link(path: str) -> str:
    return f"main a[href='{path}']"


def test_from_a_principle_down_to_a_raw_step_and_back(tab: Tab, site: str) -> None:
    tab.go(f"{site}/")
    tab.click("nav a[href='/items/3']")
    tab.click(link(f"/records/{PRINCIPLE.id}"))
    assert tab.text("h1") == f"Principle {PRINCIPLE.id}"
    tab.click(link(f"/records/{PROCEDURE.id}"))
    assert tab.text("h1") == f"Procedure {PROCEDURE.id}"
    tab.click(link(f"/records/{EPISODE}"))
    assert tab.text("h1") == f"Episode {EPISODE}"
    tab.click(link(f"/records/{TRAJECTORY}#step-1"))
    assert tab.text("h1") == f"Trajectory {TRAJECTORY}"
    assert tab.text(":target").startswith("step 1")
    assert "> enter door\nThe door is open now." in tab.text(":target").replace("\n\n", "\n")
    tab.click(f"#step-1 a[href='/records/{EPISODE}']")  # and back
    tab.click(link(f"/records/{PROCEDURE.id}"))
    tab.click(link(f"/records/{PRINCIPLE.id}"))
    assert tab.text("h1") == f"Principle {PRINCIPLE.id}"
    tab.click(link(f"/records/{TRAJECTORY}#step-0"))  # straight to the evidence
    assert tab.text(":target").startswith("step 0")
    tab.click(f"#step-0 a[href='/records/{PRINCIPLE.id}']")
    assert tab.text("h1") == f"Principle {PRINCIPLE.id}"
    assert tab.errors == []


def test_an_episode_is_replayed(tab: Tab, site: str) -> None:
    tab.go(f"{site}/")
    tab.click(link("/phases/grpo-0001"))
    tab.click(link("/episodes/grpo-0001/000-0"))
    tab.click(".strip a[href='#step-0']")
    step = " ".join(tab.text(":target").split())
    for part in (
        "You are in a vault.",
        "state 0",
        "recalled “pull it”",
        "enter door violated",
        "pull lever followed",
        "> pull lever",
        "Click.",
    ):
        assert part in step
    tab.click("#step-0 a[href='#step-1']")
    assert "reward +1.00" in tab.text(":target")
    tab.click("#step-0 a[href='/states/0']")
    assert "+0.125" in tab.text("main")
    tab.click(f"main a[href='/records/{TRAJECTORY}#step-0']")
    tab.click(link("/episodes/grpo-0001/000-0"))
    tab.click("a[rel='next']")
    assert tab.text("h1") == "Episode grpo-0001/001-0"
    assert tab.errors == []


def test_a_search(tab: Tab, site: str) -> None:
    tab.go(f"{site}/items/3")
    tab.write("input[name='words']", "no such words")
    tab.click("form button")
    assert "Nothing of this kind." in tab.text("main")
    tab.go(f"{site}/items/3")
    tab.write("input[name='words']", "LEVER")
    tab.click("form button")
    assert "1–1 of 1" in tab.text("main")
    assert tab.run("document.querySelector(\"input[name='words']\").value") == "LEVER"
    assert tab.errors == []


PAGES = [
    "/", "/items/1", "/items/2", "/items/3", "/trajectories", "/states", "/states/0", "/phases/grpo-0001",
    f"/records/{PRINCIPLE.id}", f"/records/{PROCEDURE.id}", f"/records/{EPISODE}", f"/records/{TRAJECTORY}",
    "/episodes/grpo-0001/000-0",
]  # fmt: skip


def test_nothing_is_broken_on_a_phone(tab: Tab, site: str) -> None:
    tab.size(390, 844, mobile=True)
    for page in PAGES:
        tab.go(site + page)
        tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.overflow == [], page
        assert tab.run("document.documentElement.clientWidth") == 390
    assert tab.errors == []
    assert all(request.startswith(site) for request in tab.requests)


def test_dark_and_print_have_colours_of_their_own(tab: Tab, site: str) -> None:
    def colours() -> list[str]:
        style = "getComputedStyle(document.body)"
        return [tab.run(f"{style}.backgroundColor"), tab.run(f"{style}.color")]

    tab.go(f"{site}/records/{PRINCIPLE.id}")
    tab.media(dark=False)
    assert colours() == ["rgb(251, 251, 250)", "rgb(29, 33, 39)"]
    tab.media(dark=True)
    assert colours() == ["rgb(20, 23, 27)", "rgb(229, 232, 236)"]
    tab.media("print", dark=True)
    assert colours() == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_a_report_opens_without_a_network(tab: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    rates = {"steps": 3.0, "spl": None, "invalid_rate": 0.25, "repeated_rate": 0.0, "faults": 0, "score": 0.5}
    (run / "evals").mkdir()
    for hour, phase in enumerate(("eval-start", "eval-final")):
        metrics = {"episodes": 2, "items": 2, "success": 0.5, "success_interval": [0.1, 0.9], "failures": {}} | rates
        told = evaluation(item("g0", True), item("g1", bool(hour)), finished=f"2026-01-01T0{hour}:00:00+00:00")
        told["metrics"] = metrics | {"by_type": {"put": metrics}}
        (run / "evals" / f"{phase}.json").write_text(json.dumps(told))
    with Store(f"sqlite:///{run / 'memory.db'}", create=False) as store:
        assert store.items(3)
    tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    for width, mobile in ((390, True), (1200, False)):
        tab.size(width, mobile=mobile)
        tab.go(write_report([run]).as_uri())
        tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.overflow == []
    assert tab.run("document.querySelectorAll('figure svg').length") == 3
    assert PRINCIPLE.id in tab.text("main")
    assert {request.partition(":")[0] for request in tab.requests} <= {"file", "data"}
    assert tab.errors == []
