"""Write the answers of OpenAI's API: what was told of each completion, as bodies and as chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

from ironfn.generate.engine import Token

from .asked import Asked
from .telling import Piece

LEAST = -9999.0
"""The log-probability that stands for less than any, as with OpenAI: JSON has no infinity."""


@frozen
class Answer:
    """Hold what all parts of an answer say alike. created: seconds since 1970."""

    id: str
    created: int
    asked: Asked
    tokenizer: Tokenizer

    def body(self, choices: Sequence[Sequence[Piece]], before: Sequence[str], prompt_tokens: int) -> dict[str, Any]:
        """Return the whole answer. choices: the pieces of each completion, in the order of their indices.

        before: what to put before the text of each.
        """
        kind = "chat.completion" if self.asked.chat else "text_completion"
        found = [self._choice(index, *each) for index, each in enumerate(zip(choices, before, strict=True))]
        used = sum(pieces[-1].used for pieces in choices)
        return self._head(kind) | {"choices": found, "usage": usage(prompt_tokens, used)}

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk that opens a completion of a chat."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, index: int, piece: Piece, before: str = "") -> dict[str, Any]:
        """Return the chunk of a stream that tells a piece. before: text to put before it."""
        text, log_probs = before + piece.text, self._log_probs([piece])
        choice: dict[str, Any] = {"index": index, "logprobs": log_probs, "finish_reason": piece.finish}
        told = {"delta": {"content": text} if text else {}} if self.asked.chat else {"text": text}
        return self._chunk([choice | told])

    def usage_chunk(self, prompt_tokens: int, used: int) -> dict[str, Any]:
        """Return the last chunk of a stream that was asked to tell the usage."""
        return self._chunk([]) | {"usage": usage(prompt_tokens, used)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return self._head(kind) | {"choices": choices} | ({"usage": None} if self.asked.usage else {})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _choice(self, index: int, pieces: Sequence[Piece], before: str) -> dict[str, Any]:
        text = before + "".join(piece.text for piece in pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        told = {"message": message} if self.asked.chat else {"text": text}
        return {"index": index} | told | {"logprobs": self._log_probs(pieces), "finish_reason": pieces[-1].finish}

    def _log_probs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.asked.top is None:
            return None
        tokens = [token for piece in pieces for token in piece.tokens]
        if self.asked.chat:
            return {"content": [self._detailed(token) for token in tokens], "refusal": None}
        return self._plain(tokens)

    def _detailed(self, token: Token) -> dict[str, Any]:
        best = token.top[: self.asked.top]
        return self._named(token.id, token.log_prob) | {"top_logprobs": [self._named(id, value) for id, value in best]}

    def _named(self, id: int, log_prob: float) -> dict[str, Any]:
        text, data = spelled(self.tokenizer, id)
        return {"token": text, "logprob": max(log_prob, LEAST), "bytes": list(data)}

    def _plain(self, tokens: Sequence[Token]) -> dict[str, Any]:
        names = [self._called(token.id) for token in tokens]
        offsets = [0, *accumulate(len(spelled(self.tokenizer, token.id)[0]) for token in tokens)][: len(tokens)]
        best = [((token.id, token.log_prob), *token.top) for token in tokens]
        top = [{self._called(id): max(value, LEAST) for id, value in each} for each in best]
        return {
            "tokens": names,
            "token_logprobs": [max(token.log_prob, LEAST) for token in tokens],
            "top_logprobs": top if self.asked.top else None,
            "text_offset": offsets,
        }

    def _called(self, id: int) -> str:
        """Return a token's name among others: half a character, which others are too, is told by its bytes."""
        text, data = spelled(self.tokenizer, id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if "\ufffd" in text else text


def usage(prompt_tokens: int, used: int) -> dict[str, int]:
    """Return how many tokens an answer has taken."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": used, "total_tokens": prompt_tokens + used}


def _letters() -> dict[str, int]:
    """Return which byte each letter of a byte-level tokenizer stands for (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = MappingProxyType(_letters())


def spelled(tokenizer: Tokenizer, id: int) -> tuple[str, bytes]:
    """Return a token's text and its bytes; where these are no text, they are shown as replacement characters."""
    name = tokenizer.id_to_token(id) or ""
    text = tokenizer.decode([id], skip_special_tokens=False)
    if name.startswith("<0x") and len(name) == 6 and "\ufffd" in text:
        return text, bytes([int(name[3:5], 16)])
    if "\ufffd" in text and all(letter in _BYTES for letter in name):
        return text, bytes(_BYTES[letter] for letter in name)
    if name.startswith("▁") and not text.startswith(" "):  # a decoder takes the space before a text away
        text = f" {text}"
    return text, text.encode()
