"""Batches drawn ahead in a thread, in groups that share memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch_geometric.data import Data

from ..io.disk_array import Interrupted


def prefetch(
    groups: Iterator[Data], waiting: Callable[[], bool], abandon: Callable[[], object]
) -> Iterator[Data]:
    """Yield the batches of `groups`, which a thread draws some ahead, see `forecast.batches.queue`;
    its errors are raised here.

    `waiting` is called a few times a second while the caller waits, and ends that with
    `Interrupted` by returning True. `abandon` is called if the caller leaves early, before the
    thread is joined.
    """
    end = object()
    ahead = deque[Future[Any]]()
    user = threading.get_ident()
    ended = False
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead.append(thread.submit(next, groups, end))
        while True:
            future = ahead.popleft()
            while not wait([future], 0.2).done:
                if waiting():
                    raise Interrupted
            group = future.result()
            del future
            if group is end:
                break
            while len(ahead) < group.ahead + 1:  # one more in the thread's hand
                ahead.append(thread.submit(next, groups, end))
            batches = _batches_of(group)[::-1]
            # of a batch that is handed out nothing may stay here: the user may move it to a GPU
            del group
            while batches:
                yield batches.pop()
        ended = True
    finally:
        if not ended:
            abandon()
        # The garbage collector may end this generator in a thread that is starting; a join there
        # would hang.
        thread.shutdown(wait=threading.get_ident() == user, cancel_futures=True)


def _batches_of(group: Data) -> list[Data]:
    """The batches of a group, which lie in its tensors; see `StoreLoader._group`."""
    hop_nodes, hop_edges = zip(*group.hops, strict=True)
    nodes = [sum(counts) for counts in hop_nodes]
    seeds = [counts[0] for counts in hop_nodes]
    sizes = {
        "x": nodes,
        "n_id": nodes,
        "edge_index": [2 * sum(counts) for counts in hop_edges],
        "y": seeds,
        "input_id": seeds,
    }
    # `data` has a version of its own, so that a change in place of one batch leaves the gradients
    # of others possible.
    parts: dict[str, Any] = {
        name: [part.data for part in group[name].split(each)] for name, each in sizes.items()
    }
    parts["edge_index"] = [part.view(2, -1) for part in parts["edge_index"]]
    parts |= {"batch_size": seeds, "num_sampled_nodes": hop_nodes, "num_sampled_edges": hop_edges}
    return [
        Data().update(dict(zip(parts, values, strict=True)))
        for values in zip(*parts.values(), strict=True)
    ]
