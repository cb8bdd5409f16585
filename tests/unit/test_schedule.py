from pathlib import Path

import pytest

from train.config import Config, ConfigError, config_from
from train.plan import Planned, Rates, adapter_bytes, plan_run
from train.report_data import evaluation_name
from train.schedule import collects, has_knowledge, played_in, round_evaluation, sources, trains

pytestmark = pytest.mark.unit

COLLECT = {"tasks": "household/easy/train:0-99", "episodes": 10, "samples": 2}
GRPO = {"tasks": "household/easy/train:100-199", "iterations": 2, "groups": 3, "group_size": 4}
MEMORY = {"plan_tokens": 0, "validation": {"episodes": 64}}
SAMEM = {"recall": "hint", "lifted": True}


def config(**sections: object) -> Config:
    data = {
        "run": {"name": "demo"},
        "env": {"name": "household", "max_steps": 5},
        "agent": {"max_new_tokens": 20},
        "eval": {"tasks": "household/easy/eval:0-7", "at_start": False},
        **sections,
    }
    return config_from(data, [])


def test_each_rollout_is_learnt_from_once() -> None:
    whole = config(rounds=3, memory=MEMORY, samem=SAMEM, collect=COLLECT, grpo=GRPO)
    assert [sources(whole, round) for round in (1, 2, 3)] == [
        ["collect-0001"],
        ["grpo-0001", "grpo-0002"],
        ["grpo-0003", "grpo-0004"],
    ]
    assert [played_in(whole, round) for round in (1, 2, 3)] == [
        ["collect-0001", "grpo-0001", "grpo-0002"],
        ["grpo-0003", "grpo-0004"],
        ["grpo-0005", "grpo-0006"],
    ]
    assert [collects(whole, round) for round in (1, 2, 3)] == [True, False, False]


def test_without_optimisation_every_round_collects() -> None:
    alone = config(rounds=2, memory=MEMORY, collect=COLLECT)
    assert [sources(alone, round) for round in (1, 2)] == [["collect-0001"], ["collect-0002"]]
    assert has_knowledge(alone)
    assert not trains(alone)


def test_rollouts_of_rejection_sampling_feed_the_first_round() -> None:
    rejection = {"tasks": "household/easy/train:0-99"}
    found = config(rounds=2, memory=MEMORY, rejection=rejection, grpo=GRPO)
    assert sources(found, 1) == ["rejection"]
    assert played_in(found, 1) == ["rejection", "grpo-0001", "grpo-0002"]
    assert sources(found, 2) == ["grpo-0001", "grpo-0002"]


def test_policy_alone_learns_from_nothing_beside() -> None:
    assert not has_knowledge(config(grpo=GRPO))
    assert not has_knowledge(config(grpo=GRPO, memory=MEMORY | {"mode": "none"}))
    assert has_knowledge(config(rounds=2, grpo=GRPO, samem=SAMEM))


def test_evaluations_have_names() -> None:
    one, two = config(grpo=GRPO), config(rounds=2, grpo=GRPO)
    assert [round_evaluation(two, round) for round in (1, 2)] == ["eval-round-0001", "eval-final"]
    assert evaluation_name(one.model_dump(), "eval-final") == "after RL"
    assert evaluation_name(two.model_dump(), "eval-round-0001") == "after round 1"
    assert evaluation_name(two.model_dump(), "eval-final-without") == "after round 2, without memory"
    assert evaluation_name(two.model_dump(), "eval-warm") == "after warm start"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rounds": 2, "warm_start": {"tasks": "household/easy/train:0-9"}},
            "rounds 2: nothing is played in them; add grpo",
        ),
        ({"collect": COLLECT}, "collect: nothing learns from its rollouts; add memory or samem"),
        ({"memory": MEMORY, "grpo": GRPO | {"group_size": 3}}, "memory_free_share 0.5 of grpo.group_size 3 leaves one"),
        ({"samem": SAMEM, "grpo": GRPO | {"memory_free_share": 0.25}}, "set the share to 0 or 1"),
        ({"samem": {"recall": "hint"}, "collect": COLLECT}, "set agent.thoughts: true or samem.lifted: true"),
        ({"memory": MEMORY, "collect": COLLECT | {"tasks": "household/easy/eval:0-7"}}, "collect.tasks equals eval"),
    ],
)
def test_impossible_combinations_are_named(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**sections)
    assert message in str(raised.value)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_groups_play_with_and_without_memory(share: float) -> None:
    found = config(memory=MEMORY, grpo=GRPO | {"memory_free_share": share})
    assert found.grpo is not None


SIZES = {"household/easy/eval:0-7": 8, "household/easy/train:0-99": 100, "household/easy/train:100-199": 100}


def test_the_plan_counts_what_would_be_played() -> None:
    planned = plan_run(config(rounds=2, memory=MEMORY, samem=SAMEM, collect=COLLECT, grpo=GRPO), SIZES, 1000)
    assert [(one.phase, one.episodes) for one in planned] == [
        ("collect-0001", 20),
        ("distil-0001", 0),
        ("validate-0001", 64),
        ("grpo-0001 … 0002", 24),
        ("eval-round-0001-without", 8),
        ("eval-round-0001", 8),
        ("distil-0002", 0),
        ("validate-0002", 64),
        ("grpo-0003 … 0004", 24),
        ("eval-final-without", 8),
        ("eval-final", 8),
    ]
    played = planned[0]
    assert (played.calls, played.generated) == (100, 2000)  # 20 episodes of 5 steps of 20 tokens
    assert played.bytes == 20 * 5 * 250
    update = planned[3]
    # 24 episodes of 200 + 5 (40 + 20) tokens; two adapters kept, and Adam's two moments.
    assert update.trained == 24 * 500
    assert update.bytes == 24 * 5 * 250 + 4 * 1000
    assert planned[1].bytes == 2 * 20 * 12_000


def test_plans_and_instantiations_of_the_policy_are_calls() -> None:
    memory = {"plan_tokens": 48, "instantiation": "policy", "instantiation_tokens": 10, "validation": {"episodes": 0}}
    planned = plan_run(config(rounds=2, memory=memory, collect=COLLECT), SIZES)
    first, second = (one for one in planned if one.phase.startswith("collect"))
    assert first.calls == 20 * 5  # there is no memory yet
    assert second.calls == 20 * (5 + 1 + 5)
    assert second.generated == 20 * (5 * 20 + 48 + 5 * 10)


def test_a_builder_is_asked_for_each_trajectory_and_group() -> None:
    builder = {"builder": "model", "model": {"url": "http://127.0.0.1:1", "model": "m"}}
    planned = plan_run(config(memory=MEMORY | {"builder": builder}, collect=COLLECT), SIZES)
    (distil,) = (one for one in planned if one.phase == "distil-0001")
    assert distil.builder_calls == 20 + 3 * 2  # 20 episodes, 12 a call


def test_the_warm_start_trains_whole_epochs() -> None:
    warm = {"tasks": COLLECT["tasks"], "episodes": 10, "epochs": 1.5}
    (start, evaluation) = plan_run(config(warm_start=warm), SIZES, 1000)
    assert start == Planned("warm-start", 10, trained=15 * 500, bytes=10 * 5 * 250 + 1000)
    assert start.seconds(Rates(generated=1.0, trained=75.0)) == pytest.approx(100.0)
    assert evaluation.phase == "eval-warm"


def test_the_size_of_an_adapter_follows_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, '
        '"num_key_value_heads": 1}'
    )
    lora = config(grpo=GRPO, lora={"rank": 1, "last_layers": 2}).lora
    # query and output 2 (8 + 8), key and value 2 (8 + 4), gate, up and down 3 (8 + 16): 128 weights a layer, 4 bytes.
    assert adapter_bytes(str(tmp_path), lora) == 4 * 128 * 2
    assert adapter_bytes("owner/unknown", lora) is None
