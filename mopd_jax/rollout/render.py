"""Environment messages as token ids: documents framed and shortened, nothing else ever cut."""

from collections.abc import Callable, Iterable, Sequence

from mopd_jax.model.tokens import Tokens
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.search import Document
from mopd_jax.team.episode import Message
from mopd_jax.team.roles import Prompts


class Renderer:
    """Turns messages into the ids that open or continue a conversation.

    Args:
      tokens: the checkpoint's tokenizer and template.
      prompts: wording of the document frame.
      document_tokens: most tokens of one block of documents, its frame included.
    """

    def __init__(self, tokens: Tokens, prompts: Prompts, document_tokens: int):
        self._tokens, self._prompts, self._limit = tokens, prompts, document_tokens

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Returns the first prompt of a conversation, up to where the model speaks."""
        return self._tokens.open([Message(m.role, self._content(m)) for m in messages])

    def reply(self, message: Message, closed: bool) -> list[int]:
        """Returns what follows a sampled turn; `closed`: the turn ended with the template's own token."""
        return self._tokens.reply(self._content(message), closed)

    def _content(self, message: Message) -> str:
        if not message.documents:
            return message.content
        return "\n".join(filter(None, (message.content, self.documents(message.documents))))

    def documents(self, documents: Sequence[Document]) -> str:
        """Returns the framed block in at most `document_tokens` tokens.

        Long texts lose their ends, the longest first, so that every document keeps as much as an
        equal share allows and the frame survives. Titles lose theirs only when they alone do not fit.

        Raises:
          Refusal: the frame alone does not fit.
        """
        titles, texts = [d.title for d in documents], [d.text for d in documents]
        block, count = self._fit(texts, lambda short: zip(titles, short, strict=True))
        if count > self._limit:
            block, count = self._fit(titles, lambda short: [(title, "") for title in short])
        if count > self._limit:
            raise Refusal(
                f"The frame of {len(documents)} documents takes {count} tokens, team.document_tokens is "
                f"{self._limit}: raise it, or lower retrieval.k."
            )
        return block

    def _fit(self, parts: Sequence[str], entries: Callable[[list[str]], Iterable]) -> tuple[str, int]:
        """Returns the block, and its tokens, of the (title, text) `entries` of parts that were cut to the
        largest equal share that fits, or to nothing."""
        ids = [self._tokens.encode(part) for part in parts]
        share = max(map(len, ids))
        while True:
            short = [self._shorten(*part, share) for part in zip(parts, ids, strict=True)]
            block = self._prompts.format_documents(list(entries(short)))
            count = self._tokens.count(block)
            if count <= self._limit or share == 0:
                return block, count
            over = sum(len(i) >= share for i in ids)
            shorter = max((len(i) for i in ids if len(i) < share), default=0)
            share = max(shorter, share - max(1, (count - self._limit) // over))

    def _shorten(self, text: str, ids: list[int], share: int) -> str:
        """Returns the text of the first `share` tokens; half a character at the cut is dropped."""
        return text if len(ids) <= share else self._tokens.decode(ids[:share]).rstrip("\ufffd")
