"""Did the retriever find it? Gold answers in retrieved documents."""

from collections.abc import Sequence

from mopd_jax.data.answers import normalise
from mopd_jax.retrieval.search import Document


def findable(golds: Sequence[str]) -> dict[str, str]:
    """Returns gold answer → its normalised words, without those that no text can prove: yes, no, nothing."""
    words = {gold: normalise(gold) for gold in golds}
    return {gold: w for gold, w in words.items() if w not in ("", "yes", "no")}


def holds(text: str, words: str) -> bool:
    """Returns whether a normalised text holds the normalised words, as whole words."""
    return f" {words} " in f" {text} "


def gold_recall(golds: Sequence[str], documents: Sequence[Document]) -> float | None:
    """Returns 1.0 if any document's contents hold a gold answer, else 0.0; both normalised, whole words only.

    None where there is nothing to look for: every gold answer is "yes", "no", or normalises to nothing.
    """
    wanted = findable(golds).values()
    if not wanted:
        return None
    texts = [normalise(document.contents) for document in documents]
    return float(any(holds(text, words) for words in wanted for text in texts))
