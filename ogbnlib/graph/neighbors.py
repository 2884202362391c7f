"""Neighbor sampling on a graph in CSC form: the compiled functions that draw batches.

Neighbors are a pure function of (seed, epoch, batch, hop, node): any kernel that calls `batch_key`,
`node_state` and `choose` draws the same ones. From Python, wrap keys and states in `np.uint64`,
because numba takes a plain int for an int64.
"""

import numpy as np
from numba import uint64

from ..errors import InputError
from ..kernels import Array, kernel, prefetch
from ..splitmix64 import GAMMA, mix

LOW_32 = np.uint64(0xFFFFFFFF)  # mask of the lower half of a uint64


@kernel
def batch_key(seed: np.uint64, epoch: int, first: int) -> np.uint64:
    """Return the uint64 key of one batch of one epoch; `first` is its first seed's position."""
    key = mix(uint64(seed) + GAMMA)
    key = mix((key ^ uint64(epoch)) + GAMMA)
    return mix((key ^ uint64(first)) + GAMMA)


@kernel
def node_state(key: np.uint64, hop: int, node: int) -> np.uint64:
    """Return the uint64 state of a node's (global id) random stream in the batch with `key`; the
    seeds' hop is 0."""
    hop_key = mix((uint64(key) ^ uint64(hop)) + GAMMA)
    return mix((hop_key ^ uint64(node)) + GAMMA)


@kernel
def _bounded(state: np.uint64, n: int) -> tuple[np.uint64, np.uint64]:
    """Draw `(new state, integer in [0, n))`, exactly uniform, for 1 <= n < 2**32."""
    # Multiply-shift with rejection (Lemire, "Fast random integer generation in an interval", ACM
    # TOMACS 2019) on the upper half of each splitmix64 output: the integer is the product's upper
    # half, and the lower half decides about rejection.
    bound = uint64(n)
    state += GAMMA
    product = (mix(state) >> uint64(32)) * bound
    if product & LOW_32 < bound:  # rare; else surely above the threshold, which takes a division
        threshold = (LOW_32 + uint64(1) - bound) % bound  # 2**32 mod n
        while product & LOW_32 < threshold:
            state += GAMMA
            product = (mix(state) >> uint64(32)) * bound
    return state, product >> uint64(32)


@kernel
def choose(state: np.uint64, degree: int, k: int, out: Array) -> int:
    """Write the chosen edge positions, in [0, degree), to `out` in ascending order, so that a mapped
    `row` is read forwards; return their number.

    If `k` is -1 or at least `degree`, all positions are chosen, else a uniformly random k-subset.
    `out` is int64 with room for min(k, degree) positions; `degree` is below 2**32.
    """
    if k < 0 or k >= degree:
        for i in range(degree):
            out[i] = i
        return degree
    # Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", CACM 1987) needs k draws and
    # no memory of size `degree`. Insertion into a sorted list takes k**2 / 4 moves, which is
    # cheaper than a table up to about 100 neighbors.
    state = uint64(state)
    for i in range(k):
        top = degree - k + i  # larger than anything chosen so far
        state, draw = _bounded(state, top + 1)
        position = np.int64(draw)
        j = i  # becomes the place of `position` among the i sorted ones
        while j > 0 and out[j - 1] > position:
            j -= 1
        if j > 0 and out[j - 1] == position:  # chosen already: `top` takes its place
            out[i] = top
        else:
            for shifted in range(i, j, -1):
                out[shifted] = out[shifted - 1]
            out[j] = position
    return k


@kernel
def count_chosen(degree: Array, k: int) -> int:
    """Return the number of edges that `choose_all` chooses."""
    total = 0
    for d in degree:
        total += d if k < 0 else min(k, d)  # -1: all edges
    return total


@kernel
def choose_all(
    key: np.uint64, hop: int, ids: Array, start: Array, degree: Array, k: int, begin: int,
    out: Array, target: Array,
) -> None:  # fmt: skip
    """Choose the edges of one batch at one hop: write their positions in `row` to `out`, int64, and
    the local ids of their targets to `target`, both of exactly `count_chosen(degree, k)` entries.

    `ids` are the global ids of the nodes whose neighbors are sampled, the first with local id
    `begin`; the column of node i is `row[start[i] : start[i] + degree[i]]`.
    """
    e = 0  # edges chosen so far
    for i in range(len(ids)):
        count = choose(node_state(key, hop, ids[i]), degree[i], k, out[e:])
        for j in range(e, e + count):
            out[j] += start[i]  # a position in the column becomes one in `row`
            target[j] = begin + i
        e += count


# The table from global to local ids is an open-addressing hash table of uint64: global id in the
# upper half, local id + 1 in the lower half, 0 for an empty slot. Its size is a power of two, at
# least twice the entries, so it grows with the batch and not with the graph.

# Status of a call: done; the table is full; an id is out of range; a column of the graph is
# damaged; a hop has too many edges.
DONE, FULL, BAD_ID, BAD_COLUMN, TOO_MANY = range(5)
ANY_NUMBER = 2**62  # as `most_edges`: no bound


@kernel
def _new_table(nodes: Array, count: int, entries: int, old: Array) -> tuple[Array, np.uint64]:
    """Return `(table, shift)` for `nodes[:count]` with room for `entries`, in the memory of the
    table `old` if that is large enough. The upper 64 - shift bits of a hash are its slot."""
    bits = 6  # at least 64 slots
    while (1 << bits) < 2 * entries:
        bits += 1
    table = old[: 1 << bits]
    shift = uint64(64) - uint64(bits)
    mask = (1 << bits) - 1
    if len(table) > mask:
        table[:] = uint64(0)
    else:
        table = np.zeros(1 << bits, np.uint64)
    for i in range(count):
        node = uint64(nodes[i])
        # Fibonacci hashing, Knuth, TAOCP volume 3, section 6.4
        slot = np.int64((node * GAMMA) >> shift)
        while table[slot] != uint64(0):  # taken: try the next slot
            slot = (slot + 1) & mask
        table[slot] = (node << uint64(32)) | uint64(i + 1)
    return table, shift


@kernel
def _relabel(
    table: Array, shift: np.uint64, nodes: Array, count: int, ids: Array, begin: int, num_nodes: int
) -> tuple[int, int, int]:
    """Replace global by local ids in `ids[begin:]`, appending new ids to `nodes[:count]`; `nodes`
    has room for all.

    `table`, with the `shift` of its hashes, has an entry for each of `nodes[:count]`. It stays at
    most half full; the status FULL asks for a larger table. Returns `(status, position in ids where
    it stopped, new count)`.
    """
    mask = len(table) - 1
    room = len(table) // 2
    for e in range(begin, len(ids)):
        if ids[e] < 0 or ids[e] >= num_nodes:
            return BAD_ID, e, count
        if e + 8 < len(ids):  # 8 ids ahead, so that the slot is in the cache when it is read
            prefetch(table, np.int64((uint64(ids[e + 8]) * GAMMA) >> shift))
        node = uint64(ids[e])
        slot = np.int64((node * GAMMA) >> shift)
        entry = table[slot]
        while entry != uint64(0) and entry >> uint64(32) != node:
            slot = (slot + 1) & mask
            entry = table[slot]
        if entry == uint64(0):
            if count == room:
                return FULL, e, count
            nodes[count] = ids[e]
            count += 1
            entry = uint64(count)  # the local id plus one, as 0 is an empty slot
            table[slot] = (node << uint64(32)) | entry
        ids[e] = np.int64(entry & LOW_32) - 1
    return DONE, len(ids), count


@kernel
def _joined(parts: list[Array], room: int) -> Array:
    # a copy of int64 arrays, one after the other, with `room` items more that are not set
    joined = np.empty(sum([len(part) for part in parts]) + room, np.int64)
    at = 0
    for part in parts:
        joined[at : at + len(part)] = part
        at += len(part)
    return joined


@kernel
def absorb(
    table: Array, shift: np.uint64, nodes: Array, count: int, values: Array, num_nodes: int
) -> tuple[int, int, int, Array, np.uint64]:
    """Turn the sampled global ids `values` into local ids, in place, and append new nodes to
    `nodes[:count]`, which has room for all.

    If `shift` is 0, `table` is memory for a new table. Returns `(DONE or BAD_ID, position in values
    where it stopped, new count, table, shift)`.
    """
    memory = table
    stop = 0
    while True:
        if shift == 0:
            table, shift = _new_table(nodes, count, 2 * count, memory)  # as many again fit
        status, stop, count = _relabel(table, shift, nodes, count, values, stop, num_nodes)
        if status != FULL:
            return status, stop, count, table, shift
        shift = uint64(0)  # make a larger table, and go on at `stop`


@kernel
def _columns(colptr: Array, nodes: Array, num_edges: int, start: Array, degree: Array) -> int:
    # fill `start` and `degree` of the nodes' columns; return a node with a damaged column, or -1
    for i in range(len(nodes)):
        low = colptr[nodes[i]]
        high = colptr[nodes[i] + 1]
        if low < 0 or high < low or high > num_edges:
            return nodes[i]
        start[i] = low
        degree[i] = high - low
    return -1


@kernel
def _sample(
    colptr: Array, row: Array, seeds: Array, num_neighbors: Array, key: np.uint64, fixed: bool,
    expected: int, most_edges: int, hop_nodes: Array, hop_edges: Array,
) -> tuple[int, int, Array, list[Array], list[Array]]:  # fmt: skip
    """Sample one batch, unless a hop has more than `most_edges` edges; see `sample_all`.

    A repeated seed is a node of its own, with the same neighbors; edges from it start at its first
    copy, found first in the table. Fills `hop_nodes` (the seeds, then each hop's new nodes) and
    `hop_edges`; returns `(status, culprit, nodes, sources of each hop, targets of each hop)`.
    """
    num_nodes = len(colptr) - 1
    nodes = seeds.copy()  # global ids, seeds first; a local id is a place in it
    count = len(seeds)
    sources = [nodes[:0]]  # an empty first item, from which numba infers the lists' type
    targets = [nodes[:0]]
    for i in range(count):
        if seeds[i] < 0 or seeds[i] >= num_nodes:
            return BAD_ID, seeds[i], nodes, sources, targets
    table, shift = _new_table(nodes, count, max(expected, count), np.empty(0, np.uint64))
    hop_nodes[0] = count

    # Each hop goes over its nodes and edges in separate plain loops, so that the cache misses of
    # one loop overlap.
    begin = 0  # nodes[begin:end] were found by the last hop, and are expanded by this one
    for hop in range(len(num_neighbors)):
        end = count
        start = np.empty(end - begin, np.int64)
        degree = np.empty(end - begin, np.int64)
        wrong = _columns(colptr, nodes[begin:end], len(row), start, degree)
        if wrong >= 0:
            return BAD_COLUMN, wrong, nodes, sources, targets
        k = num_neighbors[hop]
        total = count_chosen(degree, k)
        if total > most_edges:
            return TOO_MANY, total, nodes, sources, targets
        sampled = np.empty(total, np.int64)  # positions in `row`, then global ids, then local ids
        into = np.empty(total, np.int64)
        choose_all(
            key, 0 if fixed else hop, nodes[begin:end], start, degree, k, begin, sampled, into
        )
        for e in range(len(sampled)):
            sampled[e] = row[sampled[e]]
        room = min(total, num_nodes - (count - len(seeds)))  # most new nodes; a seed may repeat
        nodes = _joined([nodes[:count]], room)
        status, stop, count, table, shift = absorb(table, shift, nodes, count, sampled, num_nodes)
        if status == BAD_ID:  # in `row`
            return BAD_COLUMN, nodes[into[stop]], nodes, sources, targets
        sources.append(sampled)
        targets.append(into)
        hop_nodes[hop + 1] = count - end
        hop_edges[hop] = total
        begin = end
    return DONE, 0, nodes[:count], sources, targets


@kernel
def sample_all(
    colptr: Array, row: Array, seeds: Array, size: int, num_neighbors: Array, keys: Array,
    fixed: bool, expected: int, most_edges: int,
) -> tuple[int, int, Array, Array, Array, Array]:  # fmt: skip
    """Sample batches of `size` seeds (global ids, int64), one for each key (uint64); none if a hop
    of one of them has more than `most_edges` edges.

    With `fixed`, a node has the same neighbors at all hops. `expected` nodes or so are in the first
    batch, to size its table. Returns `(status, culprit, nodes, edges, nodes per hop, edges per
    hop)`. Without DONE, `culprit` is the invalid id, the damaged column's node or the number of
    edges. Nodes (global ids) and edges (local ids) lie batch after batch; the edges of a batch are
    all sources, then all targets. The numbers per hop have a row for each batch.
    """
    nodes = []
    edges = []
    hop_nodes = np.empty((len(keys), len(num_neighbors) + 1), np.int64)
    hop_edges = np.empty((len(keys), len(num_neighbors)), np.int64)
    for b in range(len(keys)):
        status, culprit, node, sources, targets = _sample(
            colptr, row, seeds[b * size : (b + 1) * size], num_neighbors, keys[b], fixed, expected,
            most_edges, hop_nodes[b], hop_edges[b],
        )  # fmt: skip
        if status != DONE:
            return status, culprit, node, node, hop_nodes, hop_edges  # arrays without meaning
        nodes.append(node)
        edges.extend(sources + targets)
        expected = len(node)  # the next batch is about as large
    return DONE, 0, _joined(nodes, 0), _joined(edges, 0), hop_nodes, hop_edges


def bad_column(where: str, num_nodes: int, culprit: int) -> InputError:
    """Return the error for the status `BAD_COLUMN`; `where` is the store's path, "" for arrays."""
    return damaged(
        where,
        f"colptr, row: expected ascending offsets and ids from 0 to {num_nodes - 1}, found others in "
        f"the column of node {culprit}",
    )


def damaged(where: str, problem: str) -> InputError:
    """Return the error for a damaged graph, in the store at `where` or in arrays."""
    if not where:
        return InputError(f"{problem}; the graph is damaged")
    return InputError(f"{where}: {problem}; run `python -m ogbnlib verify {where}`")
