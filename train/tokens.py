"""A conversation as token ids: the chat template's pieces, appended turn by turn, and text that stays mere text.

The literal pieces of a chat template (role headers, end-of-turn, generation prompt) are found by rendering a
conversation of unique sentinels, so any append-only template serves. Two tokenisations are kept apart:

- template literals, where special tokens are recognised;
- content (what environments, memory, files and people wrote), where none can arise: it is tokenised by a copy of the
  tokenizer from whose vocabulary, merges and added tokens every added token was removed (special or not, such as
  Qwen's ``<tool_call>``), so that ``<|im_end|>`` in an observation is nine harmless characters.

Rule of whitespace: ``start``, ``turn`` and ``reply`` strip leading and trailing whitespace off their contents, because
byte-pair tokenizers merge it into the newline that ends a role header. With it, and for content that spells no added
token, the ids equal those of the template rendered on the whole conversation of stripped contents.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError
from tokenizers import Tokenizer

from train.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SYSTEM = "qzsystemqz"
_USERS = ("qzfirstuserqz", "qzseconduserqz", "qzthirduserqz")
_AGENTS = ("<think>\nqzfirstthoughtqz\n</think>\n\nqzfirstreplyqz", "<think>\nqzsecondthoughtqz\n</think>\n\nqzlastqz")
_PROBES = ("Your task is to: look.\n\nYou see 2 mugs (dirty); it's 21.5 °C.", "Thought: go on.\nAction: go to sink 1")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Message = dict[str, str]


class Codec(Protocol):
    """The pieces of a dialogue as ids: :class:`TokenCodec`'s are a model's tokens, those of
    :class:`train.api_model.MessageCodec` are not."""

    token_level: bool
    """Whether the ids are a model's tokens, so that what it generates can be trained on."""
    eot_id: int

    def text(self, text: str) -> list[int]: ...

    def start(self, system: str | None, user: str) -> list[int]: ...

    def turn(self, user: str, *, closed: bool) -> list[int]: ...

    def reply(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class TokenCodec:
    """Token ids of a chat's turns for one tokenizer and its chat template.

    Raises:
        ConfigError: no chat template, not a fast byte-pair tokenizer, a template that is not append-only (it rewrites
            or drops earlier turns or thinking), or one whose turns cannot be tokenised apart.
    """

    token_level = True
    eot_id: int
    """The token that ends an assistant's turn: the one stop token of generation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise ConfigError(f"tokenizer {self._name!r} has no chat template; use an instruct model or set one")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"tokenizer {self._name!r} is {type(tokenizer).__name__}; a fast (tokenizers) one is needed"
            )
        self._backend = backend
        self.added_ids = frozenset(backend.get_added_tokens_decoder()) | frozenset(tokenizer.all_special_ids)
        """Ids that content never yields: special tokens and all other added ones."""
        self._plain, self._unknown_id = _without_added_tokens(backend, self.added_ids, self._name)

        try:
            (head,), after_user, after_agent = self._pieces(system=False)
        except TemplateError as error:
            raise ConfigError(f"chat template of {self._name!r} fails on a plain conversation: {error}") from None
        self._head = self._literal(head)
        self._system_head: list[list[int]] | None = None
        try:
            system_head, *after = self._pieces(system=True)
        except TemplateError:
            pass  # the template takes no system message; start() says so when one is given
        else:
            if after != [after_user, after_agent]:
                raise self._not_append_only("turns look different with a system message")
            self._system_head = [self._literal(piece) for piece in system_head]
        self._generation_prompt = self._literal(after_user)
        self.eot_id, *self._next_user = self._literal(after_agent) or [-1]
        if self.eot_id not in self.added_ids:
            raise ConfigError(
                f"chat template of {self._name!r}: an assistant's turn ends with {after_agent!r}, which does not begin "
                "with a special token; use a template with an end-of-turn token"
            )
        self._verify()

    def text(self, text: str) -> list[int]:
        """Ids of content, as it is (not stripped); none of them is in ``added_ids``.

        A character that the vocabulary cannot write (SmolLM2 lacks the bytes of some control characters and rare
        planes), or half of a surrogate pair, becomes U+FFFD.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self._unknown_id in ids:
            lost = {char for char in set(text) if self._unknown_id in self._plain.encode(char).ids}
            kept = "".join(_REPLACEMENT if char in lost else char for char in text)
            ids = self._plain.encode(kept, add_special_tokens=False).ids
        return ids

    def start(self, system: str | None, user: str) -> list[int]:
        """Ids of a conversation's beginning, up to and including the generation prompt.

        ``system`` None: what the template does without one (SmolLM2 and Qwen2.5 put a default system prompt).

        Raises:
            ConfigError: ``system`` is given and the template takes none.
        """
        if system is None:
            head = self._head
        elif self._system_head is None:
            raise ConfigError(f"chat template of {self._name!r} takes no system message; put it into the first turn")
        else:
            head = self._system_head[0] + self.text(system.strip()) + self._system_head[1]
        return head + self.text(user.strip()) + self._generation_prompt

    def turn(self, user: str, *, closed: bool) -> list[int]:
        """Ids that follow an assistant's completion, up to and including the next generation prompt.

        ``closed``: the completion ends with the end-of-turn token; False (the length limit cut it): the token comes
        first here.
        """
        end = [] if closed else [self.eot_id]
        return end + self._next_user + self.text(user.strip()) + self._generation_prompt

    def reply(self, text: str) -> list[int]:
        """Ids of an assistant's completion that no model sampled (a demonstration), end-of-turn token included."""
        return [*self.text(text.strip()), self.eot_id]

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids`` without special tokens."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _literal(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _render(self, messages: list[Message]) -> str:
        """The template's text for ``messages`` and a generation prompt."""
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        return rendered

    def _pieces(self, *, system: bool) -> tuple[list[str], str, str]:
        """Literal pieces: around the system message up to the first user's content, after a user, after an assistant.

        Raises TemplateError when the template refuses the conversation.
        """
        turns = [_USERS[0], _AGENTS[0], _USERS[1], _AGENTS[1], _USERS[2]]
        contents = [_SYSTEM, *turns] if system else turns
        messages = _messages(_SYSTEM if system else None, turns)
        rest = self._render(messages)
        pieces = []
        for content in contents:
            piece, found, rest = rest.partition(content)
            if not found or content in rest:
                raise self._not_append_only(f"it renders {content!r} {'twice' if found else 'not at all'}")
            pieces.append(piece)
        head_size = 2 if system else 1
        head, after_user, after_agent = pieces[:head_size], pieces[head_size], pieces[head_size + 1]
        if pieces[head_size:] != [after_user, after_agent] * 2 or rest != after_user:
            raise self._not_append_only("equal turns look different by their place")
        whole = self._render(messages)
        for count in (1, 3):
            prefix = self._render(messages[: count + head_size - 1])
            if not whole.startswith(prefix):
                raise self._not_append_only("a longer conversation does not begin with the shorter one's prompt")
        return head, after_user, after_agent

    def _verify(self) -> None:
        """Compare the ids of a small conversation with those of the template's whole text."""
        observation, reply = _PROBES
        for system in (None, observation) if self._system_head else (None,):
            ids = self.start(system, observation) + self.reply(reply) + self.turn(observation, closed=True)
            whole = self._literal(self._render(_messages(system, [observation, reply, observation])))
            if ids != whole:
                raise ConfigError(
                    f"tokenizer {self._name!r}: the turns of its chat template cannot be tokenised one by one (ids"
                    " differ from the whole one's); use a template whose contents follow a special token or a newline"
                )
        for text in (observation, _REPLACEMENT):
            if self.decode(self.text(text)) != text:
                raise ConfigError(f"tokenizer {self._name!r} changes text: {text!r} does not decode to itself")

    def _not_append_only(self, reason: str) -> ConfigError:
        return ConfigError(
            f"chat template of {self._name!r} is not append-only: {reason}; set a template that keeps earlier turns as "
            "they were (thinking included)"
        )


def _messages(system: str | None, turns: list[str]) -> list[Message]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _without_added_tokens(backend: Tokenizer, added_ids: frozenset[int], name: str) -> tuple[Tokenizer, int]:
    """A copy of ``backend`` that cannot produce ``added_ids``, and the id it gives to what it cannot write.

    Removing the tokens from the list of added ones would not be enough: SmolLM2 holds them in its vocabulary too, and
    its token for unknown bytes is ``<|endoftext|>``. So they leave the vocabulary and the merges, and unknown bytes get
    an id that no token has.
    """
    data: dict[str, Any] = json.loads(backend.to_str())
    model = data["model"]
    if model["type"] != "BPE":
        raise ConfigError(f"tokenizer {name!r} is a {model['type']} model; only byte-pair (BPE) ones are supported")
    removed = {token for token, index in model["vocab"].items() if index in added_ids}
    unknown = "unknown bytes"  # no token of a vocabulary holds a plain space
    unknown_id = max(*model["vocab"].values(), *added_ids) + 1
    model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in removed}
    model["vocab"][unknown] = unknown_id
    model["merges"] = [pair for pair in model["merges"] if not removed & {*pair, "".join(pair)}]
    model["unk_token"] = unknown
    data.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(data)), unknown_id
