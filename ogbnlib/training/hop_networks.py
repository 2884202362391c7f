"""SGC, SIGN and SAGN: models on propagated features.

Propagated features are a node's own features and their aggregates over 1, 2, ... hops. Each model
takes rows [B, (hops + 1) * F] of B seeds, nearest hop first, in RAM or on the GPU, and returns
scores [B, classes].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TrainConfig


class SGC(nn.Module):
    """A linear layer on the last hop."""

    def __init__(self, config: TrainConfig, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.width = num_features // (config.hops + 1)  # features of one hop
        self.out = nn.Linear(self.width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x[:, -self.width :])


class _HopLayers(nn.Module):
    """A linear layer for each hop."""

    def __init__(self, config: TrainConfig, num_features: int, bias: bool) -> None:
        super().__init__()
        self.dropout = config.dropout
        width = num_features // (config.hops + 1)
        self.hops = nn.ModuleList(
            nn.Linear(width, config.hidden_channels, bias) for _ in range(config.hops + 1)
        )

    def rows(self, x: Tensor) -> list[Tensor]:
        """Return the result of each hop's layer, [B, hidden]."""
        x = x.view(len(x), len(self.hops), -1)  # [B, hops + 1, F]
        return [hop(x[:, k]) for k, hop in enumerate(self.hops)]


class SIGN(_HopLayers):
    """A linear layer for each hop, ReLU and dropout; then a linear layer on all hops together."""

    def __init__(self, config: TrainConfig, num_features: int, num_classes: int) -> None:
        super().__init__(config, num_features, bias=True)
        self.out = nn.Linear(config.hidden_channels * (config.hops + 1), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = [F.dropout(row.relu(), self.dropout, self.training) for row in self.rows(x)]
        return self.out(torch.cat(rows, 1))


class SAGN(_HopLayers):
    """Sum of hops k, weighted by the softmax of LeakyReLU(a h_0 + b h_k) for each node and head.

    A linear layer of the node's own features is added; then follow ReLU, dropout and `out`.
    """

    def __init__(self, config: TrainConfig, num_features: int, num_classes: int) -> None:
        super().__init__(config, num_features, bias=False)
        self.heads = config.heads
        hidden = config.hidden_channels
        self.out = nn.Linear(hidden, num_classes)
        self.own = nn.Linear(num_features // (config.hops + 1), hidden)
        self.attention = nn.Parameter(torch.empty(2, self.heads, hidden // self.heads))
        nn.init.xavier_normal_(self.attention, gain=nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor) -> Tensor:
        # [B, hops + 1, heads, hidden / heads]
        by_head = torch.stack(self.rows(x), 1).view(len(x), len(self.hops), self.heads, -1)
        of_node, of_hop = self.attention  # a and b, each [heads, hidden / heads]
        scores = (by_head[:, :1] * of_node).sum(-1, keepdim=True)
        scores = scores + (by_head * of_hop).sum(-1, keepdim=True)  # [B, hops + 1, heads, 1]
        shares = F.leaky_relu(scores, negative_slope=0.2).softmax(1)  # over the hops
        own = self.own(x[:, : self.own.in_features])
        hidden = ((shares * by_head).sum(1).flatten(1) + own).relu()
        return self.out(F.dropout(hidden, self.dropout, self.training))
