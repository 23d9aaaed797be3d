"""Is it right? Exact match and its softer companions, on normalised answers (the usual SQuAD rules)."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Returns the text in lower case, without ASCII punctuation and articles, blanks made single.

    Accents and other Unicode characters (an en dash) stay.
    """
    bare = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(bare.split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Returns 1.0 if the prediction equals any gold answer after normalisation, else 0.0.

    Where nothing is left of the prediction, the stripped, case-folded raw strings are compared instead:
    gold answers such as "A", "The The" and "*" exist.
    """
    key = normalise if normalise(prediction) else _raw
    return float(any(key(prediction) == key(gold) for gold in golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """Returns the best F1 of the normalised words over the gold answers, 0.0 … 1.0.

    A gold answer of which normalisation leaves nothing counts 1.0 or 0.0, by exact match.
    """
    return max((_f1(prediction, gold) for gold in golds), default=0.0)


def contains(prediction: str, golds: Sequence[str]) -> float:
    """Returns 1.0 if any normalised gold answer is a substring of the normalised prediction, else 0.0.

    A gold answer of which normalisation leaves nothing must match exactly: it is in every string.
    """
    words = normalise(prediction)
    return float(
        any(
            wanted in words if (wanted := normalise(gold)) else exact_match(prediction, [gold])
            for gold in golds
        )
    )


def _raw(text: str) -> str:
    return text.strip().casefold()


def _f1(prediction: str, gold: str) -> float:
    found, wanted = normalise(prediction).split(), normalise(gold).split()
    if not found or not wanted:
        return exact_match(prediction, [gold])
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))
