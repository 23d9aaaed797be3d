"""The only place that turns text into token ids and back.

A conversation is rendered in the checkpoint's own chat template, but append-only: the template is
rendered once with placeholders at load time and cut into frames, so that a later turn's prompt is the
ids so far plus new ids, and nothing that was sampled is ever decoded and encoded again.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etils import epath
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mopd_jax.model.folders import FILES, read_json
from mopd_jax.refusal import Refusal
from mopd_jax.team.episode import Message

# White space around the placeholders, so that a template that strips contents is noticed.
_SYSTEM, _USER, _ASSISTANT = (f" \n[[{name}]]\n " for name in ("system", "user", "assistant"))

Frame = tuple[int | str, ...]
"""A stretch of rendered template: ids of special tokens, plain text, and the placeholders."""


class Tokens:
    """Vocabulary, chat frames and stop tokens of one checkpoint."""

    eos_ids: tuple[int, ...]
    """Ids at which sampling of a turn stops, ascending."""
    end_of_turn_id: int
    """The one of them with which the template closes an assistant turn (Qwen3: `<|im_end|>`)."""
    vocab_size: int
    """Ids that stand for something; a model's logits may be padded beyond it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_ids: Sequence[int]):
        """Takes a fast tokenizer with a chat template and the ids that end a turn.

        Raises:
          Refusal: the template is no append-only one, its end of turn is not among `eos_ids`, or the
            vocabulary reaches a special token from plain text.
        """
        self._backend = tokenizer.backend_tokenizer
        self._added = {str(t): i for i, t in tokenizer.added_tokens_decoder.items()}
        self._plain = _without_added_tokens(self._backend)
        self._refuse_reachable_tokens()
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.vocab_size = len(tokenizer)
        self._template, lone_user = _render_template(tokenizer)
        opening, _, reply = self._template
        self._openings = {
            ("system", "user"): self._cut(opening),
            ("user",): self._cut(lone_user),
        }
        closed, *self._reply = self._cut(reply)
        self.end_of_turn_id = self._check_end_of_turn(closed)
        self._check_frames()

    @classmethod
    def from_folder(cls, folder: epath.PathLike) -> "Tokens":
        """Returns the tokens of a Hugging Face folder (local or gs://): fast tokenizer, chat template,
        and `generation_config.json` for the stop ids.

        Raises:
          Refusal: a file is missing or torn (named), no chat template, no stop token, or what
            `Tokens` refuses.
        """
        tokenizer = _load_tokenizer(epath.Path(folder))
        generation = read_json(epath.Path(folder) / "generation_config.json")
        eos = generation.get("eos_token_id")
        eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        if not eos_ids:
            raise Refusal(f"{folder}: found no eos_token_id, set one in generation_config.json.")
        return cls(tokenizer, sorted(eos_ids))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text. Special and other added tokens in it are spelled out as ordinary
        text (`<|im_end|>` never becomes its id), so that no document ends a turn or forges an action."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens spelled out. Bytes that are no complete UTF-8 become
        U+FFFD and ids beyond `vocab_size` vanish, so encode(decode(ids)) may differ from ids."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def count(self, text: str) -> int:
        """Returns the number of tokens of plain text."""
        return len(self.encode(text))

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Returns the first prompt of a conversation, an optional system and one user message, up to and
        including the generation prompt.

        Raises:
          ValueError: other roles, or a message whose documents were not rendered into its content.
        """
        roles = tuple(message.role for message in messages)
        if roles not in self._openings:
            raise ValueError(f"Found messages of {roles}, expected ('system', 'user') or ('user',).")
        if any(message.documents for message in messages):
            raise ValueError("A message still carries documents; render them into its content first.")
        slots = {"system": _SYSTEM, "user": _USER}
        return self._fill(self._openings[roles], {slots[m.role]: m.content for m in messages})

    def reply(self, content: str, closed: bool) -> list[int]:
        """Returns the ids that follow a sampled assistant turn and open the next one with a user message.

        If the turn is not `closed`, that is, its last sampled id is not `end_of_turn_id`, they start with
        that id; like all of them it was not sampled and has mask 0.
        """
        ids = self._fill(self._reply, {_USER: content})
        return ids if closed else [self.end_of_turn_id, *ids]

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What two checkpoints must share for one to score the other's ids (kept in checkpoints too)."""
        model = json.loads(self._backend.to_str())["model"]
        vocabulary = [
            sorted(self._backend.get_vocab().items()),
            model.get("merges"),
            sorted(self._added.items()),
        ]
        return {
            "tokenizer": hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
            "eos_ids": " ".join(map(str, self.eos_ids)),
            "end_of_turn_id": self.end_of_turn_id,
            "template": "".join(self._template),
            "vocab_size": self.vocab_size,
        }

    def _cut(self, text: str) -> Frame:
        """Cuts rendered template at its special tokens and placeholders."""
        marks = sorted([*self._added, _SYSTEM, _USER, _ASSISTANT], key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
        return tuple(self._added.get(piece, piece) for piece in pieces if piece)

    def _fill(self, frame: Frame, contents: dict[str, str]) -> list[int]:
        """Encodes a frame. Content and the plain text around it are encoded together, as the template's
        own rendering is, so that tokens may span their border (the line break after the role's name)."""
        ids, text = [], ""
        for piece in frame:
            if isinstance(piece, int):
                ids += [*self.encode(text), piece]
                text = ""
            else:
                text += contents.get(piece, piece)
        return ids + self.encode(text)

    def _refuse_reachable_tokens(self):
        unknown = getattr(self._backend.model, "unk_token", None)
        for token, i in self._added.items():
            if token != unknown and i in self.encode(token):
                raise Refusal(
                    f"The plain text {token!r} is encoded to the added token {i}, expected ordinary tokens. "
                    "Take it out of the vocabulary's words or let the pre-tokenizer split it."
                )

    def _check_end_of_turn(self, token: int | str) -> int:
        if token not in self.eos_ids:
            raise Refusal(
                f"The chat template closes an assistant turn with {token!r}, expected one of the stop tokens "
                f"{self.eos_ids}. Add its id to eos_token_id in generation_config.json."
            )
        return token

    def _check_frames(self):
        contents = {_SYSTEM: _SYSTEM, _USER: _USER}
        opening, _, reply = self._template
        ours = self._fill(self._openings["system", "user"], contents), self.reply(_USER, closed=False)
        for text, found in zip((opening, reply), ours, strict=True):
            expected = self._backend.encode(text, add_special_tokens=False).ids
            if found != expected:
                raise Refusal(
                    f"The rendered template {text!r} is encoded piecewise to {found}, as a whole to "
                    f"{expected}. Expected a tokenizer that treats text between special tokens independently."
                )


def files_fingerprint(folder: epath.PathLike) -> str:
    """Returns a hash (hex) of the files that say how text is encoded and where sampling stops."""
    digest, folder = hashlib.sha256(), epath.Path(folder)
    for name in FILES:
        if name != "config.json" and (folder / name).exists():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()[:16]


def check_compatible(
    student: Tokens, other: Tokens, student_vocab: int, other_vocab: int, name: str = "teacher"
) -> None:
    """Checks that a frozen model can score the student's ids, or play beside it.

    Args:
      student, other: the two checkpoints' tokens.
      student_vocab, other_vocab: width of their logits, padding included.
      name: what the other one is.

    Raises:
      Refusal: names the fields that differ, both values, and what to change.
    """
    ours = student.fingerprint | {"padded vocabulary": student_vocab}
    theirs = other.fingerprint | {"padded vocabulary": other_vocab}
    differences = [f"{k}: student {ours[k]!r}, {name} {theirs[k]!r}" for k in ours if ours[k] != theirs[k]]
    if differences:
        raise Refusal(
            f"Student and {name} differ in {'; '.join(differences)}; expected the same. Use a {name} "
            "trained from the student's base model, with its tokenizer, chat template and "
            "generation_config.json."
        )


def _load_tokenizer(folder: epath.Path) -> PreTrainedTokenizerFast:
    needed = ("tokenizer_config.json", "generation_config.json")
    for name in FILES:
        if name.endswith(".json") and (name in needed or (folder / name).exists()):
            read_json(folder / name)  # transformers does not say which of them is torn
    with tempfile.TemporaryDirectory() as local:  # transformers reads no gs:// paths
        for name in FILES:
            if (folder / name).exists():
                (Path(local) / name).write_bytes((folder / name).read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(local, local_files_only=True)
    if not tokenizer.is_fast:
        raise Refusal(f"{folder}: found a slow tokenizer, expected one with tokenizer.json.")
    if not tokenizer.chat_template:
        raise Refusal(
            f"{folder}: found no chat template. Add chat_template.jinja, or `chat_template` in "
            "tokenizer_config.json."
        )
    return tokenizer


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    settings = json.loads(backend.to_str())
    return Tokenizer.from_str(
        json.dumps(settings | {"added_tokens": [], "truncation": None, "padding": None})
    )


def _render_template(tokenizer: PreTrainedTokenizerFast) -> tuple[tuple[str, str, str], str]:
    """Returns (opening, assistant sentinel, reply) of a conversation with a system message, and the
    opening of one without; checks that longer conversations only append to shorter ones."""

    def render(*messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    start, turn = [("system", _SYSTEM), ("user", _USER)], [("assistant", _ASSISTANT), ("user", _USER)]
    opening, two, three = (render(*start, *turn * n) for n in range(3))
    reply = two[len(opening + _ASSISTANT) :]
    if two != opening + _ASSISTANT + reply or three != two + _ASSISTANT + reply:
        raise Refusal(
            f"The chat template is not append-only: it renders {opening!r}, then {two!r}, then {three!r}; "
            "expected each to start with the one before and the assistant's turn unchanged. Use a template "
            "that neither strips nor rewrites earlier turns."
        )
    lone_user = render(("user", _USER))
    if [opening.count(_SYSTEM), opening.count(_USER), reply.count(_USER), lone_user.count(_USER)] != [1] * 4:
        raise Refusal(
            f"The chat template changes the messages' contents: found {opening!r} and {reply!r}, expected "
            "each content once and verbatim, white space included."
        )
    return (opening, _ASSISTANT, reply), lone_user
