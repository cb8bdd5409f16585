"""The pages of ``saga browse``: what they show, how they are linked, and that what they show cannot act."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from memory.store import Store
from tests.chronicle import HOSTILE, NAME, PRINCIPLE, PROCEDURE, played, write_run
from tests.command import error_of
from tests.vault import episode
from train.browse import HEADERS, is_loopback, make_app
from train.browse_pages import Browser
from train.ingest import trajectory_of
from train.run_folder import read_run

pytestmark = pytest.mark.unit

TRAJECTORY = trajectory_of(played(0), NAME).id
EPISODE = episode(trajectory_of(played(0), NAME)).id
EVERY = [
    "/", "/items/1", "/items/2", "/items/3", "/trajectories", f"/records/{PRINCIPLE.id}", f"/records/{PROCEDURE.id}",
    f"/records/{EPISODE}", f"/records/{TRAJECTORY}", "/states", "/states/0", "/states/1", "/phases/grpo-0001",
    "/episodes/grpo-0001/000-0", "/episodes/grpo-0001/001-0",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def client(run: Path) -> Iterator[TestClient]:
    with Store(f"sqlite:///{run / 'memory.db'}", create=False) as store:
        yield TestClient(make_app(Browser(store, read_run(run))), base_url="http://localhost:8642")


def text(client: TestClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())


def test_every_link_leads_somewhere(client: TestClient) -> None:
    seen: set[str] = set()
    waiting = ["/"]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        ids = set(re.findall(r'\bid="([^"]*)"', answer.text))
        for link in re.findall(r'(?:href|src)="([^"]*)"', answer.text):
            there, _, place = link.replace("&amp;", "&").partition("#")
            assert there.startswith("/") or (not there and place in ids), link
            waiting += [there] if there else []
    assert set(EVERY) <= {path.partition("?")[0] for path in seen}


@pytest.mark.parametrize("path", EVERY)
def test_what_was_written_by_others_is_shown_and_cannot_act(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "script-src" not in HEADERS["Content-Security-Policy"]  # none, by default-src 'none'
    assert "<script" not in answer.text
    assert "<img" not in answer.text
    assert "style=" not in answer.text
    assert HOSTILE not in answer.text


def test_what_hides_or_turns_the_writing_is_replaced(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/memory.db") as store:
        of = trajectory_of(played(0), NAME).model_copy(update={"goal": "a\u202eb\u200bc\x1b[2J"})
        store.add_trajectories([of])
        answer = TestClient(make_app(Browser(store)), base_url="http://localhost").get(f"/records/{of.id}")
    assert "a\ufffdb\ufffdc\ufffd[2J" in answer.text


def test_from_a_principle_to_the_step_and_back(client: TestClient) -> None:
    rows = text(client, "/items/3")
    assert "When a lever is in sight: pull it first." in rows
    assert "shown 1 times, outcome with it 1.000 (1 episodes)" in rows
    principle = client.get(f"/records/{PRINCIPLE.id}").text
    assert f'href="/records/{PROCEDURE.id}"' in principle
    assert f'href="/records/{TRAJECTORY}#step-0"' in principle
    assert "direction passed 0.500 0.250 to 0.750" in text(client, f"/records/{PRINCIPLE.id}")
    assert f'href="/records/{EPISODE}"' in client.get(f"/records/{PROCEDURE.id}").text
    steps = client.get(f"/records/{TRAJECTORY}").text
    assert f'href="/records/{PRINCIPLE.id}"' in steps.split('id="step-0"')[1].split('id="step-1"')[0]
    assert f'href="/records/{PROCEDURE.id}"' in steps.split('id="step-1"')[1]
    assert 'href="/episodes/grpo-0001/000-0"' in steps


def test_an_episode_step_by_step(client: TestClient) -> None:
    told = text(client, "/episodes/grpo-0001/000-0")
    assert "won score 1.00, 2 steps" in told
    assert "plan: find the lever" in told
    assert "suppressed: over the token budget" in told
    first, second = told.split("step 0")[1].split("step 1")
    order = [
        "resampled",
        "You are in a vault.",
        "state 0 (cosine 0.990)",
        "recalled “pull it” +0.125",
        "given as a hint, followed",
    ]
    order += [
        "enter door violated",
        "pull lever followed",
        "played",
        "&gt; pull lever",
        "Click.",
        "values state 0",
        "+0.000 → +0.125",
    ]
    places = [first.find(part) for part in order]
    assert places == sorted(places)
    assert -1 not in places
    assert "reward +1.00" in second
    assert "state 1" in second
    lost = text(client, "/episodes/grpo-0001/001-0")
    assert "lost score 0.00, 2 steps, failed by knowledge" in lost
    assert "in the memory:" not in lost


def test_values_of_a_state(client: TestClient) -> None:
    assert "1 +0.500 1 1 a door stands open" in text(client, "/states")
    state = text(client, "/states/0?table=main")
    assert "+0.125" in state
    assert "1 visits, 1 of 1 led on recalled" in state
    assert f"{TRAJECTORY} step 0 +0.000 → +0.125 reward +0.00, target +0.250" in state


def test_filters(client: TestClient) -> None:
    assert "1–1 of 1" in text(client, "/items/3?status=audited")
    assert "Nothing of this kind." in text(client, "/items/3?status=rejected")
    assert "1–1 of 1" in text(client, "/items/3?words=LEVER")
    assert "Nothing of this kind." in text(client, "/items/3?words=%3Cscript%3E")
    assert "1–1 of 1" in text(client, "/trajectories?outcome=success")
    assert "Nothing of this kind." in text(client, "/trajectories?outcome=failure")
    assert "grpo-0001/001-0" in text(client, "/phases/grpo-0001?outcome=lost")
    assert "grpo-0001/000-0" not in text(client, "/phases/grpo-0001?outcome=lost")
    assert "1–2 of 2" in text(client, "/phases/grpo-0001?page=-1")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/records/r-0000", "item: &#39;r-0000&#39; is not in the memory"),
        ("/records/t-0000", "trajectory: &#39;t-0000&#39; is not in the memory"),
        ("/items/4", "There is no level 4"),
        ("/items/3?status=odd", "status: &#39;odd&#39;"),
        ("/states/7", "state: 7 is not in table &#39;main&#39;"),
        ("/states?table=%3Cb%3E", "There is no table &#39;&lt;b&gt;&#39; of values"),
        ("/phases/..%2f..%2fetc", "There is no"),
        ("/phases/other", "There is no phase other"),
        ("/episodes/grpo-0001/9", "There is no episode grpo-0001/9"),
        ("/episodes/other/9", "There is no phase other"),
        ("/nothing", "There is no page /nothing"),
    ],
)
def test_what_is_not_there_is_said(client: TestClient, path: str, reason: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert reason in answer.text
    assert answer.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]


def test_only_this_machine_and_only_reading(client: TestClient) -> None:
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"Host": "127.0.0.1:8642"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:8642"}).status_code == 200
    assert client.post("/").status_code == 405
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "box")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_memory_without_a_run_and_a_run_without_a_memory(run: Path, tmp_path: Path) -> None:
    with Store(f"sqlite:///{run / 'memory.db'}", create=False) as store:
        alone = TestClient(make_app(Browser(store)), base_url="http://localhost")
        assert "Episodes of the run" not in text(alone, "/")
        assert "Replay this episode" not in text(alone, f"/records/{TRAJECTORY}")
    bare = TestClient(make_app(Browser(None, read_run(run))), base_url="http://localhost")
    assert "No memory: name one with --store" in text(bare, "/")
    assert "enter door violated" in text(bare, "/episodes/grpo-0001/000-0")
    assert bare.get("/items/3").status_code == 404


def test_what_is_neither_run_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist; name a memory file, a run folder or a URL" in error_of(
        monkeypatch, capsys, "browse", str(tmp_path / "no.db")
    )
