"""Every registered model, so that a new one is tested by being there."""

import torch.nn.functional as F
from torch import Tensor, nn

from ogbnlib.registry import MODELS

KINDS = {name: entry.load() for name, entry in MODELS.items()}
SAMPLED = [name for name, kind in KINDS.items() if not kind.propagated]
PROPAGATED = [name for name, kind in KINDS.items() if kind.propagated]
EXACT = [name for name, kind in KINDS.items() if kind.exact_weights]


def untrimmed(name: str, convs: nn.ModuleList, x: Tensor, edges: Tensor) -> Tensor:
    """The layers of a model, each on every node and edge."""
    kind = KINDS[name]
    edges = edges[:, edges[1].argsort(stable=True)]
    shared = kind.prepare(edges, len(x))
    for layer, conv in enumerate(convs):
        x = conv((x, x), *kind.adjacency(edges, len(x), len(x), shared))
        x = x if layer == len(convs) - 1 else F.relu(x)
    return x
