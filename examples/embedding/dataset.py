"""Co-occurrences of words in CPython's help texts (`pydoc_data.topics`)."""

import re
from collections import Counter, defaultdict
from pydoc_data.topics import topics

import torch
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from torch.utils.data import TensorDataset


def read_paragraphs() -> list[list[str]]:
    """Return the words of each paragraph, without stop words; a repeated paragraph counts once."""
    paragraphs = re.split(r"\n{2,}", "\n\n".join(topics[name] for name in sorted(topics)))
    return [
        [
            word
            for word in re.findall(r"[a-z_]{2,}", paragraph.lower())
            if word not in ENGLISH_STOP_WORDS
        ]
        for paragraph in dict.fromkeys(paragraphs)
    ]


def count_pairs(paragraphs: list[list[int]], window: int) -> dict[tuple[int, int], float]:
    """Count unordered pairs up to `window` words apart; words d apart count 1 / d, as in GloVe."""
    counts: defaultdict[tuple[int, int], float] = defaultdict(float)
    for words in paragraphs:
        for position, word in enumerate(words):
            for distance, other in enumerate(words[position + 1 : position + 1 + window], start=1):
                counts[min(word, other), max(word, other)] += 1 / distance
    return counts


def load_pairs(
    words: int, window: int = 10, held_out: float = 0.1
) -> tuple[list[str], TensorDataset, TensorDataset]:
    """Return the `words` most frequent words, and the pairs of them to train on and to hold out.

    A pair is two positions in the vocabulary, shape (2,), and the logarithm of its count. The
    training set holds both orders of each of its pairs.
    """
    paragraphs = read_paragraphs()
    frequencies = Counter(word for paragraph in paragraphs for word in paragraph)
    vocabulary = [word for word, _ in frequencies.most_common(words)]
    ids = {word: i for i, word in enumerate(vocabulary)}
    counts = count_pairs(
        [[ids[w] for w in paragraph if w in ids] for paragraph in paragraphs], window
    )

    pairs = torch.tensor(list(counts))
    log_counts = torch.tensor(list(counts.values())).log()
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    cut = round(len(pairs) * held_out)
    test, train = order[:cut], order[cut:]
    both_orders = torch.cat([pairs[train], pairs[train].flip(1)])
    return (
        vocabulary,
        TensorDataset(both_orders, log_counts[train].repeat(2)),
        TensorDataset(pairs[test], log_counts[test]),
    )
