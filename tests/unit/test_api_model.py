"""A chat API as the policy: what it is sent, what is counted and kept, and what is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import Task
from envs.pool import EnvPool
from tests.scripted_server import Reply, ScriptedServer, script
from train.agent import Job, PolicyPlayer, play_episode
from train.api_model import ApiModel, MessageCodec
from train.chat import ModelFault
from train.config import AgentConfig, Config, ConfigError
from train.policy import Policy
from train.server_model import ServerModel
from train.trajectory import Episode

pytestmark = pytest.mark.unit

COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("pool_worker.py")))
AGENT = AgentConfig(context_tokens=400, observation_tokens=50, max_new_tokens=20)
JOB = Job("p/0", "p", Task("household", "a", "t"), seed=0)
CODEC = MessageCodec()


@given(st.text())
def test_text_is_read_back_and_four_characters_are_a_token(text: str) -> None:
    ids = CODEC.text(text)
    assert CODEC.decode(ids) == text
    assert len(ids) == -(-len(text) // 4)
    assert not {0, 1, 2, 3} & set(ids)


def test_messages_by_hand() -> None:
    ids = CODEC.start(" Be brief. ", "Hello\n") + CODEC.reply("Hi.") + CODEC.turn("And?", closed=True)
    assert CODEC.messages(ids) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And?"},
    ]
    assert CODEC.messages(CODEC.start(None, "x")) == [{"role": "user", "content": "x"}]
    with pytest.raises(ModelFault, match="does not go on from the beginning of a reply"):
        CODEC.messages(ids + CODEC.text("Thought:"))


def play(server: ScriptedServer) -> Episode:
    async def main() -> Episode:
        model = ApiModel(ServerModel([server.url], "strong", None, retry_s=0.1), CODEC)
        player = PolicyPlayer(model, CODEC, JOB, AGENT, 0.7, 7)
        try:
            async with EnvPool({"name": "scripted", "max_steps": 3}, 1, 1, 1000, 20.0, worker_command=COMMAND) as pool:
                return await play_episode(pool, player, JOB, 3)
        finally:
            await model.close()

    return asyncio.run(main())


def test_an_episode_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with ScriptedServer(script(Reply("Action: look"), Reply("Action: win"))) as server:
        episode = play(server)
    assert (episode.won, episode.model, [step.action for step in episode.steps]) == (True, "strong", ["look", "win"])
    headers, body = server.requests[1]
    assert headers["Authorization"] == "Bearer secret"
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in body["messages"][2:]] == ["Action: look", "did look"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("strong", 0.7, 20)
    assert episode.contexts == [], "there is nothing to train on"
    # "Action: look" are 12 characters, "Action: win" 11: three pieces each, and the end of the turn
    assert episode.tokens_out == 4 + 4


def test_a_refusal_is_a_fault_of_the_episode() -> None:
    with ScriptedServer(script(Reply("no such model", status=400))) as server:
        episode = play(server)
    assert episode.status == "model_error"
    assert "HTTP 400: no such model" in (episode.error or "")


def config(**sections: Any) -> Config:
    model = {"name": "strong", "engine": "api", "urls": ["https://api.example"]}
    return Config.model_validate(
        {"run": {"name": "x"}, "model": model, "eval": {"tasks": "household/easy/eval-48"}} | sections
    )


def test_it_takes_no_adapter_and_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plays and cannot be trained, but grpo is given"):
        config(grpo={"tasks": "household/easy/train:0-9"})
    with pytest.raises(ValueError, match="engine 'api' needs urls"):
        config(model={"engine": "api"})
    with pytest.raises(ConfigError, match="an API takes no adapter"):
        Policy(config(), adapter=tmp_path, trainable=False, folder=tmp_path)
    policy = Policy(config(), adapter=None, trainable=False, folder=tmp_path)
    assert (policy.dtype, policy.chat.name) == ("", "strong")
    asyncio.run(policy.close())
