"""Names of nodes and classes are text, for numpy and pandas, decoded where they are used."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ogbnlib import InputError, convert, propagate
from ogbnlib.errors import MB
from ogbnlib.graph.store import Store
from ogbnlib.graph.text import Text

NAMES = ["Anaïs", "bob", "李雷", "d", "e"]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Store]:
    def build(ids: list[object]) -> Store:
        folder = tmp_path / "source"
        folder.mkdir()
        tables = {
            "edges": {"source": ids[:3], "target": ids[1:4]},
            "features": {"node_id": ids, "a": range(5), "b": range(5)},
            "labels": {"node_id": ids, "label": ["öl", "gas", "öl", "gas", "wind"]},
        }
        for name, columns in tables.items():
            pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
        for number, split in enumerate(("train", "valid", "test")):
            np.save(folder / f"{split}.npy", np.array(ids[number : number + 1]))
        return convert(folder, tmp_path / "store", progress=False)

    return build


def test_names_are_text_for_numpy_and_pandas(make: Callable[..., Store], tmp_path: Path) -> None:
    store = make(NAMES)
    names = store.node_name
    assert [*names] == names[:].tolist() == np.asarray(names).tolist() == NAMES
    assert names[2] == "李雷"
    assert isinstance(names[0], str)
    assert names[-2:].tolist() == ["d", "e"]
    assert names[np.array([[2, 0]])].tolist() == [["李雷", "Anaïs"]]
    assert names[store.y == 0].tolist() == ["bob", "d"]
    assert "bob" in names
    assert np.isin(names, ["e", "f"]).tolist() == [False] * 4 + [True]
    assert repr(names) == "Text(['Anaïs', 'bob', '李雷', ...], n=5)"
    assert isinstance(store.label_name, np.ndarray)
    assert store.label_name.tolist() == ["gas", "wind", "öl"]
    assert store.read("node_name").tolist() == NAMES
    mine = pd.DataFrame({"client": NAMES[::-1], "amount": range(5)})
    theirs = pd.DataFrame({"client": names, "area": store.label_name[store.y]})
    merged = mine.merge(theirs, on="client")
    assert merged.client.tolist() == NAMES[::-1]
    assert merged.area.tolist() == ["wind", "gas", "öl", "gas", "öl"]
    assert pd.Series(names).tolist() == NAMES
    propagated = propagate(store, tmp_path / "hops", hops=1, nodes="all", progress=False)
    for name in ("node_name", "label_name"):
        assert getattr(propagated, name)[:].tolist() == getattr(store, name)[:].tolist()


def test_a_few_names_of_many_take_the_memory_of_a_few() -> None:
    names = Text(np.full(10**6, b"bob", "S20"))  # as text 80 MB
    tracemalloc.start()
    try:
        assert names[[1, 3]].tolist() == ["bob", "bob"]
        assert names[4] == "bob"
        assert tracemalloc.get_traced_memory()[1] < 10 * MB
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("file_chunks")
def test_names_are_looked_up_in_chunks(make: Callable[..., Store]) -> None:
    store = make(NAMES)
    for names in (["e", "Anaïs", "e"], ("e", "Anaïs", "e"), pd.Series(["e", "Anaïs", "e"])):
        assert store.ids(names).tolist() == [4, 0, 4]
    assert store.ids(store.node_name).tolist() == [0, 1, 2, 3, 4]
    assert store.ids([]).dtype == np.int64
    assert store.ids([3, 1]).tolist() == [3, 1]  # numbers, as no name is one
    many = ["bob", *map(str, range(7))]
    for wrong, words in ((many, "row 1: .*'0'"), ("bob", "'bob'"), ([5], "0 to 4, found 5")):
        with pytest.raises(InputError, match=words):
            store.ids(wrong)


def test_names_that_are_numbers_stay_numbers_and_are_found(make: Callable[..., Store]) -> None:
    store = make([7, 40, 2**40, 3, 5])
    assert store.node_name.dtype == np.int64
    assert store.node_name.tolist() == [7, 40, 2**40, 3, 5]
    assert store.ids([2**40, 7]).tolist() == [2, 0]
    assert store.ids(["40"]).tolist() == [1]
    with pytest.raises(InputError, match=r"row 1: .*7 and 40, .*4"):
        store.ids([3, 4])
