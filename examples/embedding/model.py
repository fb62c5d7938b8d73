"""GloVe word embeddings (Pennington et al., 2014); `plain.py` and `train.py` share them."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


class GloVe(nn.Module):
    """Approximates the log count of a pair (i, j) by w_i . c_j + b_i + b'_j."""

    def __init__(self, words: int, width: int = 100, dropout: float = 0.5) -> None:
        """Build embeddings of `width` features for each word, as a word and as a context."""
        super().__init__()
        self.word = nn.Embedding(words, width)
        self.context = nn.Embedding(words, width)
        self.word_bias = nn.Embedding(words, 1)
        self.context_bias = nn.Embedding(words, 1)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5 / width, 0.5 / width)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map pairs of word ids (N, 2) to their log counts (N,)."""
        word, context = pairs.unbind(dim=1)
        product = self.dropout(self.word(word) * self.context(context)).sum(dim=1)
        return product + (self.word_bias(word) + self.context_bias(context)).squeeze(1)

    @torch.no_grad()
    def neighbours(self, word: int, count: int) -> list[int]:
        """Return the `count` words of the largest cosine similarity, nearest first."""
        vectors = self.word.weight + self.context.weight
        directions = normalize(vectors - vectors.mean(dim=0))
        similarity = directions @ directions[word]
        return similarity.topk(count + 1).indices[1:].tolist()


def weighted_error(predicted: Tensor, log_counts: Tensor, saturation: float = 10.0) -> Tensor:
    """Return the mean squared error; pairs seen less often than `saturation` weigh less."""
    weights = (log_counts.exp() / saturation).clamp(max=1) ** 0.75
    return (weights * (predicted - log_counts) ** 2).mean()
