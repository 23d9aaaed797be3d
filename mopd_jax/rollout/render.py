"""Environment messages as token ids: documents framed and shortened, nothing else ever cut."""

from collections.abc import Sequence

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
        equal share allows and the frame survives.

        Raises:
          Refusal: titles and frame alone do not fit.
        """
        texts = [self._tokens.encode(d.text) for d in documents]
        share = max(map(len, texts))
        while (count := self._tokens.count(block := self._block(documents, texts, share))) > self._limit:
            if share == 0:
                raise Refusal(
                    f"Titles and frame of {len(documents)} documents take {count} tokens, "
                    f"team.document_tokens is {self._limit}: raise it, or lower retrieval.k."
                )
            over = sum(len(t) >= share for t in texts)
            shorter = max((len(t) for t in texts if len(t) < share), default=0)
            share = max(shorter, share - max(1, (count - self._limit) // over))
        return block

    def _block(self, documents: Sequence[Document], texts: list[list[int]], share: int) -> str:
        return self._prompts.format_documents(
            [(d.title, self._shorten(d.text, ids, share)) for d, ids in zip(documents, texts, strict=True)]
        )

    def _shorten(self, text: str, ids: list[int], share: int) -> str:
        """Returns the text of the first `share` tokens; half a character at the cut is dropped."""
        return text if len(ids) <= share else self._tokens.decode(ids[:share]).rstrip("\ufffd")
