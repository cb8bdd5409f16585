from pathlib import Path

import pytest

from train.config import Config, ConfigError, config_from, load_config, save_config

pytestmark = pytest.mark.unit

MINIMAL = "run: {name: demo}\nenv: {name: household}\neval: {tasks: household/easy/eval-48}\n"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_and_overrides(minimal: Path) -> None:
    config = load_config(minimal, ["run.seed=7", "grpo.tasks=household/easy/train:0-9", "agent.thoughts=true"])
    assert config.run.seed == 7
    assert config.agent.thoughts is True
    assert config.grpo is not None
    assert config.grpo.group_size == 8
    assert config.env.name == "household"


def test_saved_config_reads_back_equal(minimal: Path, tmp_path: Path) -> None:
    config = load_config(minimal, ["env.max_steps=12", "tracking.tags=[a, b]"])
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.max_step=3", "env.max_step: unknown key (value 3); did you mean 'max_steps'?"),
        ("env.name=minecraft", "env.name: 'minecraft'; name one of household, alfworld, scienceworld, jericho"),
        ("env={max_steps: 3}", "env.name: None; name one of household"),
        ("foo=1", "foo: unknown key (value 1); known keys: run, rounds, model,"),
        ("agent.thoughts=ja", "agent.thoughts: 'ja': Input should be a valid boolean"),
        ("run.seed=-1", "run.seed: -1: Input should be greater than or equal to 0"),
        ("model.engine=server", "engine 'server' needs urls"),
        ("eval.tasks=alfworld/valid_seen", "eval.tasks 'alfworld/valid_seen' belongs to 'alfworld'"),
        ("lora.rank=24", "lora.rank: 24"),
        ("grpo={tasks: household/easy/eval-48}", "grpo.tasks equals eval.tasks"),
        ("agent.max_new_tokens=600", "raise context_tokens"),
        ("run.name=../x", "run.name: '../x'"),
        ("run", "override 'run': write key.sub=value"),
        ("run.name.x=1", "'name' holds the value 'demo', not a section"),
        ("run.seed=[", "is not a YAML value"),
        ("warm_start.epochs=1", "warm_start.tasks: missing"),
        ("samem.recall=replace", "with agent.thoughts false it has none; set agent.thoughts: true"),
        ("samem.epsilon_end=0.5", "samem: epsilon_end: 0.5 is above epsilon_start 0.3"),
        ("samem.gama=0.5", "samem.gama: unknown key (value 0.5); did you mean 'gamma'?"),
    ],
)
def test_a_mistake_names_field_value_and_remedy(minimal: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(minimal, [override])
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n", "holds list"), ("a: [\n", "not YAML"), ("run: {name: x}\n", "eval: missing")],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert message in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")


def test_env_sections_are_told_apart_by_name() -> None:
    data = {
        "run": {"name": "x"},
        "env": {"name": "scienceworld", "simplification": ""},
        "eval": {"tasks": "scienceworld/strict-175"},
    }
    config = config_from(data, [])
    assert isinstance(config, Config)
    assert config.env.model_dump() == {"name": "scienceworld", "max_steps": 100, "simplification": ""}
    with pytest.raises(ConfigError, match=r"env\.folder: unknown key"):
        config_from({**data, "env": {"name": "alfworld", "folder": "x"}, "eval": {"tasks": "alfworld/dev-30"}}, [])


GRPO = {"tasks": "household/easy/train:0-9"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"deterministic": True}}, "run.deterministic needs agent.concurrency 1, not 16"),
        ({"run": {"deterministic": True}, "model": {"engine": "vllm"}}, "needs model.engine hf, not 'vllm'"),
        ({"grpo": GRPO | {"staleness": 1}}, "grpo.staleness 1 needs a server"),
        ({"model": {"engine": "vllm", "urls": ["http://a:1"]}}, "engine is 'vllm'; set engine: server or drop urls"),
        ({"grpo": GRPO | {"train_roles": ["thought"]}}, r"grpo\.train_roles\.0: 'thought': .*'action', 'plan'"),
        ({"eval": {"tasks": "household/easy/eval:0-3", "at_start": False}}, "eval.at_start is false and nothing is"),
        ({"memory": {"budget_tokens": 1100}}, r"memory\.budget_tokens 1100 is over half of agent\.context_tokens 2048"),
        ({"memory": {"embedder": {"kind": "server"}}}, r"memory\.embedder: kind 'server' needs url and model"),
        ({"memory": {"mode": "ful"}}, r"memory\.mode: 'ful': .*'full'"),
        ({"memory": {"retrieval": {"principle": 3}}}, r"retrieval\.principle: unknown key .*did you mean 'principles'"),
        ({"rejection": {"tasks": "household/easy/eval:0-3"}}, r"rejection\.tasks equals eval\.tasks"),
    ],
)
def test_combinations_that_cannot_run(changes: dict[str, dict[str, object]], message: str) -> None:
    data: dict[str, dict[str, object]] = {"run": {"name": "demo"}, "eval": {"tasks": "household/easy/eval:0-3"}}
    for section, values in changes.items():
        data[section] = data.get(section, {}) | values
    with pytest.raises(ConfigError, match=message):
        config_from(data, [])


@pytest.mark.parametrize(
    ("model", "staleness", "expected"), [("hf", None, 0), ("vllm", None, 1), ("vllm", 0, 0), ("vllm", 1, 1)]
)
def test_staleness_is_one_with_a_server_unless_it_is_given(model: str, staleness: int | None, expected: int) -> None:
    data = {"run": {"name": "demo"}, "eval": {"tasks": "household/easy/eval:0-3"}, "model": {"engine": model}}
    assert config_from(data | {"grpo": GRPO | {"staleness": staleness}}, []).staleness == expected
    assert config_from(data, []).staleness == int(model == "vllm")
