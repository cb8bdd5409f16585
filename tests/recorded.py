"""A language model's recorded answers to the exact prompts for twenty real episodes, and how they are used.

``tests/data/memory_builder_answers.json`` holds, for the SHA-256 of each prompt, the answer; its ``origin`` says who
wrote them. The episodes themselves are not in the repository: ``SAGA_ROLLOUTS`` names the folder with
``alfworld_llama2-13b.jsonl.xz``. When a prompt file, or the way material is rendered, changes, the hashes no longer
match and the answers have to be written anew: ``python -m tests.recorded FOLDER`` builds as far as the recorded answers
go and writes the open prompts into FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory.build_report import BuildReport
from memory.builder import LanguageModelBuilder
from memory.builder_settings import BuilderSettings
from memory.formats import Labels
from memory.language_model import LanguageModel
from memory.records import Trajectory
from memory.store import Store
from tests.scripted_server import Reply, ScriptedServer
from train.ingest import outside_trajectories

ANSWERS = Path(__file__).parent / "data" / "memory_builder_answers.json"
EPISODES = (82, 114, 346, 94, 75, 438, 316, 504, 325, 30, 39, 489, 263, 190, 73, 468, 27, 88, 74, 502)
"""Numbers of the twenty entries: of every task type at least one that succeeded and two that did not."""


def rollouts() -> list[Trajectory]:
    """All 510 real episodes, the twenty first."""
    path = Path(os.environ["SAGA_ROLLOUTS"]) / "alfworld_llama2-13b.jsonl.xz"
    parsed = outside_trajectories(path, Labels("alfworld", "alfworld-0.3", agent="llama2-13b")).trajectories
    chosen = [parsed[number - 1] for number in EPISODES]
    return chosen + [trajectory for trajectory in parsed if trajectory not in chosen]


def prompt_hash(messages: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def build_recorded(store: Store, folder: Path) -> tuple[BuildReport, list[dict[str, Any]]]:
    """Build ``store`` with the recorded answers; returns the report and the requests that no answer was there for."""
    recorded = {row["prompt"]: row["answer"] for row in json.loads(ANSWERS.read_text())["answers"]}
    open_: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Reply:
        found = recorded.get(prompt_hash(body["messages"]))
        if found is None:
            open_.append(body)
            return Reply("no answer is recorded for this prompt")
        return Reply(json.dumps(found, ensure_ascii=False))

    with ScriptedServer(answer) as server:
        settings = BuilderSettings.model_validate(
            {
                # Asked once: a recorded answer has to be right at the first try.
                "model": {"url": server.url, "model": "recorded", "reasks": 0},
                "repairs": 0,
                "max_trajectories": len(EPISODES),
            }
        )
        assert settings.model is not None
        model = LanguageModel(settings.model, folder / "calls")
        try:
            report = LanguageModelBuilder(store, model, settings, folder).build()
        finally:
            model.close()
    return report, open_


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Store(f"sqlite:///{folder}/memory.db") as store:
        store.add_trajectories(rollouts())
        report, open_ = build_recorded(store, Path(folder))
    print("\n".join(report.lines()))
    for number, body in enumerate(open_):
        text = "\n\n".join(f"## {message['role']}\n{message['content']}" for message in body["messages"])
        (out / f"{number:02}-{prompt_hash(body['messages'])}.md").write_text(text)
    print(f"{len(open_)} open prompts in {out}")


if __name__ == "__main__":
    main()
