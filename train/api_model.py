"""A chat API as the policy (``model.engine: api``): it plays, and since it tells no token ids, it cannot be trained.

The agent keeps its dialogue as ids, as ever (:mod:`train.conversation`); here an id stands for up to four characters,
which is about a token, so that budgets mean about what they say, and an id can be read back without a tokenizer.
"""

from __future__ import annotations

from train.chat import Generation, ModelFault, Sampling
from train.server_model import ServerModel

_CHARACTERS = 4
_BITS = 21  # of a code point
_ROLES = ("system", "user", "assistant")


class MessageCodec:
    """The pieces of a dialogue as ids, and back as messages (see :class:`train.tokens.Codec`)."""

    token_level = False
    eot_id = 0

    def text(self, text: str) -> list[int]:
        pieces = (text[start : start + _CHARACTERS] for start in range(0, len(text), _CHARACTERS))
        return [_number(piece) for piece in pieces]

    def start(self, system: str | None, user: str) -> list[int]:
        head = [] if system is None else [1, *self.text(system.strip())]
        return [*head, 2, *self.text(user.strip()), 3]

    def turn(self, user: str, *, closed: bool) -> list[int]:
        return [2, *self.text(user.strip()), 3]

    def reply(self, text: str) -> list[int]:
        return [*self.text(text.strip()), self.eot_id]

    def decode(self, ids: list[int]) -> str:
        return "".join(_piece(number) for number in ids if number > len(_ROLES))

    def messages(self, ids: list[int]) -> list[dict[str, str]]:
        """The messages of a prompt, which ends where the assistant's reply begins.

        Raises:
            ModelFault: the reply was begun, which an API does not go on from.
        """
        starts = [place for place, number in enumerate(ids) if 0 < number <= len(_ROLES)]
        ends = [*starts[1:], len(ids)]
        found = [
            {"role": _ROLES[ids[start] - 1], "content": self.decode(ids[start + 1 : end])}
            for start, end in zip(starts, ends, strict=True)
        ]
        if found.pop()["content"]:
            raise ModelFault("an API does not go on from the beginning of a reply; set samem.recall to hint")
        return found


def _number(piece: str) -> int:
    """Above the numbers of the roles, for one character or more; no two pieces have the same."""
    number = 0
    for character in piece:
        number = number << _BITS | ord(character) + 1
    return number + len(_ROLES)


def _piece(number: int) -> str:
    number -= len(_ROLES)
    characters = []
    while number:
        characters.append(chr((number & (1 << _BITS) - 1) - 1))
        number >>= _BITS
    return "".join(reversed(characters))


class ApiModel:
    """A :class:`train.chat.ChatModel` over ``/v1/chat/completions``; log-probabilities are not known, and 0.

    Args:
        server: opened without a codec.
    """

    adapter = "base"

    def __init__(self, server: ServerModel, codec: MessageCodec) -> None:
        self.name = server.name
        self._server = server
        self._codec = codec

    async def complete(self, prompt_ids: list[int], sampling: Sampling, conversation: str) -> Generation:
        """Answer the messages of ``prompt_ids``. Raises ModelFault."""
        answer = await self._server.chat(self._codec.messages(prompt_ids), sampling)
        ids = self._codec.text(answer.text.strip())
        if answer.finish == "stop":
            ids.append(self._codec.eot_id)
        return Generation(
            text=answer.text,
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            finish=answer.finish,
            prompt_tokens=answer.prompt_tokens,
        )

    def release(self, conversation: str) -> None:
        return None

    async def close(self) -> None:
        await self._server.close()
