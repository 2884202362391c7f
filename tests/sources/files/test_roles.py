"""A column of a user's file has one role, decided once for all files, and the label is never a
feature."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ogbnlib import InputError, Store, convert
from ogbnlib.sources.arrays import from_arrays
from ogbnlib.sources.files.own_files import open_tables
from ogbnlib.sources.leaks import refuse_leaks

NODES = 60


def graph() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    order = rng.permutation(NODES)
    return {
        "edges": rng.integers(0, NODES, (2, 200)),
        "x": pd.DataFrame(rng.normal(size=(NODES, 2)), columns=["a", "b"]),
        "y": rng.integers(0, 4, NODES),
        "splits": {"train": order[:30], "valid": order[30:45], "test": order[45:]},
    }


def save(folder: Path, **tables: Any) -> Path:
    """Write a folder: data frames as csv (parquet if the name ends in _parquet), arrays as npy, None
    leaves a file out."""
    files: dict[str, Any] = {"edges": graph()["edges"], "features": graph()["x"]}
    files |= {"labels": graph()["y"], **graph()["splits"]}
    for name, values in tables.items():
        files.pop(name.removesuffix("_parquet"), None)
        files[name] = values
    folder.mkdir()
    for name, values in files.items():
        if isinstance(values, str):
            (folder / f"{name}.csv").write_text(values)
        elif isinstance(values, pd.DataFrame) and name.endswith("_parquet"):
            values.to_parquet(folder / f"{name.removesuffix('_parquet')}.parquet", index=False)
        elif isinstance(values, pd.DataFrame):
            values.to_csv(folder / f"{name}.csv", index=False)
        elif values is not None:
            np.save(folder / f"{name}.npy", values)
    return folder


def features(folder: Path, **options: Any) -> np.ndarray[Any, Any]:
    return np.concatenate(list(open_tables(folder, **options).x_chunks()))


def split_names() -> list[str]:
    names = np.empty(NODES, object)
    for split, ids in graph()["splits"].items():
        names[ids] = split
    return names.tolist()


ROLES = ["Y", "topic", "train_mask", "Val_Mask", "split"]


@pytest.mark.parametrize("kind", ["", "_parquet"])
@pytest.mark.parametrize("name", ROLES)
def test_a_column_with_another_role_is_no_feature(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = graph()["y"]
    values = y if name in ("Y", "topic") else (y > 0).astype(int)
    label = name.lower() if name in ("Y", "topic") else "label"
    files = {
        f"features{kind}": graph()["x"].assign(**{name: values}),
        f"labels{kind}": pd.DataFrame({"node_id": range(NODES), label: y}),
    }
    columns = ["node_id", "topic"] if name == "topic" else None
    assert features(save(tmp_path / "own", **files), label_columns=columns).shape == (NODES, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "features." in line]
    assert f"'{name}'" in line
    assert "feature 'a', 'b'" in line


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_roles_of_one_file_do_not_depend_on_the_order_of_a_set(
    hash_seed: str, tmp_path: Path
) -> None:
    # Only the label's column has a known name, so the names' column is the one that it leaves.
    names = [f"C{i:03d}" for i in range(NODES)]
    table = pd.DataFrame({"client": names, "label": graph()["y"]})
    splits = pd.DataFrame({"id": names, "split": split_names()})
    edges = pd.DataFrame({"source": names[1:], "target": names[:-1]})
    gone = dict.fromkeys(("features", "labels", "train", "valid", "test"))
    folder = save(tmp_path / "own", edges=edges, splits=splits, nodes_parquet=table, **gone)
    options = {"features": "ones", "labels": str(folder / "nodes.parquet"), "relabel": True}
    code = "import sys; from ogbnlib.sources.files.own_files import open_tables; "
    code += f"open_tables(sys.argv[1], **{options!r})"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_one_file_serves_several_roles(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    g = graph()
    names = np.array([f"C{i:03d}" for i in range(NODES)])
    table = g["x"].assign(fraud=g["y"], part=0)
    table.insert(0, "client", names)
    for split, ids in g["splits"].items():
        table[f"{split}_mask"] = np.isin(np.arange(NODES), ids)
    table = table.drop(columns="part")
    edges = pd.DataFrame({"source": names[g["edges"][0]], "target": names[g["edges"][1]]})
    gone = dict.fromkeys(("features", "labels", "train", "valid", "test"))
    folder = save(tmp_path / "own", edges=edges, **gone)
    file = folder / f"nodes_of_all.{kind}"
    getattr(table, f"to_{kind}")(file, index=False)
    roles = {"features": file, "labels": file, "splits": file}
    source = open_tables(folder, label_columns=["client", "fraud"], **roles)
    np.testing.assert_array_equal(np.concatenate(list(source.label_chunks())), g["y"])
    assert np.concatenate(list(source.x_chunks())).shape == (NODES, 2)
    for split, ids in source.read_splits().items():
        np.testing.assert_array_equal(ids, np.sort(g["splits"][split]))
    err = capsys.readouterr().err
    expected = "id 'client'; feature 'a', 'b'; label 'fraud'; mask 'train_mask', 'valid_mask', "
    assert f"{file.name}: {expected}'test_mask'" in err
    one_by_one = dict.fromkeys(("train", "valid", "test"), file)
    roles = {"features": file, "labels": file, **one_by_one}
    source = open_tables(folder, id_column="client", label_columns=["fraud"], **roles)
    for split, ids in source.read_splits().items():
        np.testing.assert_array_equal(np.sort(ids), np.sort(g["splits"][split]))


@pytest.mark.parametrize("name", ["Target", "y_true", "label", "CLASS", "innocent"])
@pytest.mark.parametrize("code", [lambda y: y, lambda y: 2.5 - y, lambda y: (y + 2) % 4 * 10])
def test_the_labels_in_other_words_are_refused_whatever_their_name(
    name: str, code: Any, tmp_path: Path
) -> None:
    folder = save(tmp_path / "own", features=graph()["x"].assign(**{name: code(graph()["y"])}))
    with pytest.raises(InputError, match=f"'{name}'.*--leave-out {name}"):
        convert(folder, tmp_path / "store", progress=False)
    assert features(folder, leave_out=[name]).shape == (NODES, 2)


def test_labels_in_the_features_are_found_in_any_format(tmp_path: Path) -> None:
    g = graph()
    x, y = g["x"].to_numpy(), g["y"]
    text = pd.DataFrame({"node_id": range(NODES), "label": [f"area {3 - c}" for c in y]})
    folder = save(tmp_path / "npy", features=np.column_stack([x, y]), labels=text)
    with pytest.raises(InputError, match=r"features.npy, column 2 \(from 0\): .*labels"):
        refuse_leaks(open_tables(folder))
    onehot = g["x"].assign(**{f"k{c}": (y == c).astype(int) for c in range(4)})
    with pytest.raises(InputError, match=r"'k0', 'k1', 'k2'.* together"):
        refuse_leaks(open_tables(save(tmp_path / "onehot", features=onehot)))
    lists = pd.DataFrame({"x": list(np.column_stack([x, y]))})
    with pytest.raises(InputError, match=r"features.parquet, column 2 \(from 0\)"):
        refuse_leaks(open_tables(save(tmp_path / "lists", features_parquet=lists)))
    some = np.where(np.arange(NODES) % 2, y, -1)
    splits = {split: ids[some[ids] >= 0] for split, ids in g["splits"].items()}
    folder = save(tmp_path / "some", features=g["x"].assign(c=y), labels=some, **splits)
    with pytest.raises(InputError, match="'c'"):
        refuse_leaks(open_tables(folder))


def test_a_column_that_says_less_or_equals_the_labels_by_chance_stays(tmp_path: Path) -> None:
    g = graph()
    y = g["y"]
    noisy = np.where(np.arange(NODES) == 7, (y + 1) % 4, y)
    coarse = (y > 1).astype(int)  # a real attribute may follow from the class
    x = g["x"].assign(noisy=noisy, coarse=coarse, constant=1)
    assert features(save(tmp_path / "own", features=x)).shape == (NODES, 5)
    few = np.full(NODES, -1)
    few[:3] = [0, 1, 1]
    splits = {"train": np.array([0]), "valid": np.array([1]), "test": np.array([2])}
    x = g["x"].assign(two=np.arange(NODES) % 2, one=(np.arange(NODES) > 0).astype(int))
    assert features(save(tmp_path / "few", features=x, labels=few, **splits)).shape == (NODES, 4)


def descending() -> pd.DataFrame:
    ids = np.arange(NODES)[::-1]
    return pd.DataFrame({"paper_id": ids, "label": graph()["y"][ids]})


def test_a_column_of_ids_is_never_dropped(tmp_path: Path) -> None:
    folder = save(tmp_path / "own", labels=descending())
    with pytest.raises(InputError, match="--label-columns paper_id,label"):
        open_tables(folder)
    for name in ("paper_id", "rank", "p"):
        other = save(tmp_path / name, labels=descending().rename(columns={"paper_id": name}))
        with pytest.raises(InputError, match=f"column '{name}'.*--label-columns {name},label"):
            open_tables(other, label_columns=["label"])
        source = open_tables(other, label_columns=[name, "label"])
        np.testing.assert_array_equal(np.concatenate(list(source.label_chunks())), graph()["y"])
        assert open_tables(other, leave_out=[name]).num_classes == 4
    from_one = save(tmp_path / "one", labels=descending().eval("paper_id = paper_id + 1"))
    with pytest.raises(InputError, match=r"column 'paper_id'.*all different"):
        open_tables(from_one, label_columns=["label"])
    gaps = save(tmp_path / "gaps", labels=descending().eval("paper_id = paper_id * 10"))
    with pytest.raises(InputError, match="column 'paper_id'"):
        open_tables(gaps, label_columns=["label"])
    text = descending().rename(columns={"paper_id": "who"})
    text["who"] = [f"C{i:05d}" for i in text["who"]]
    with pytest.raises(InputError, match=r"column 'who'.*all different"):
        open_tables(save(tmp_path / "text", labels=text), label_columns=["label"])
    measured = descending().assign(paper_id=np.linspace(0, 0.5, NODES))
    measured = measured.rename(columns={"paper_id": "score"})
    assert open_tables(save(tmp_path / "score", labels=measured), label_columns=["label"])
    year = descending().assign(paper_id=2000).rename(columns={"paper_id": "year"})
    assert open_tables(save(tmp_path / "year", labels=year), label_columns=["label"])
    in_order = descending()[::-1]
    assert open_tables(save(tmp_path / "order", labels=in_order), label_columns=["label"])


def test_every_remedy_of_a_refusal_works(tmp_path: Path) -> None:
    folder = save(tmp_path / "own", features=graph()["x"].to_csv())  # pandas' column without a name
    with pytest.raises(InputError, match="--id-column ''; else --leave-out ''"):
        open_tables(folder)
    assert features(folder, id_column="").shape == (NODES, 2)
    assert features(folder, leave_out=[""]).shape == (NODES, 2)
    folder = save(tmp_path / "text", features=graph()["x"].assign(area="physics"))
    with pytest.raises(InputError, match=r"column 'area', row 0: .*--leave-out area"):
        open_tables(folder)
    assert features(folder, leave_out=["AREA"]).shape == (NODES, 2)


def test_a_column_of_names_is_never_dropped(tmp_path: Path) -> None:
    names = np.array([f"n{i}" for i in range(NODES)])
    x = graph()["x"].assign(node_id=names)
    edges = pd.DataFrame(names[graph()["edges"].T], columns=["src", "dst"])
    splits = {split: names[ids] for split, ids in graph()["splits"].items()}
    labels = pd.DataFrame({"who": names[::-1], "label": graph()["y"][::-1]})
    folder = save(tmp_path / "own", features=x, edges=edges, labels=labels, **splits)
    with pytest.raises(InputError, match=r"column 'who'.*--label-columns who,label"):
        open_tables(folder, label_columns=["label"])


SEVERAL = ["0,1", "1;2", "[0, 1]", "0|3", "(0, 1)", "{0,1}", "['a', 'b']", "0 1", "a;b"]


@pytest.mark.parametrize("field", SEVERAL)
@pytest.mark.parametrize("others", ["mixed", "alone"])
def test_several_labels_in_a_field_are_refused(field: str, others: str, tmp_path: Path) -> None:
    single = ["a", "b"] if "a" in field and others == "mixed" else ["0", "1"]
    if field == "a;b":
        single = ["a", "b"]
    fields = [field if i % 7 == 3 or others == "alone" else single[i % 2] for i in range(NODES)]
    if others == "alone" and field == "a;b":
        fields[:2] = ["a", "b"]
    labels = pd.DataFrame({"node_id": range(NODES), "label": fields})
    for kind in ("labels", "labels_parquet"):
        with pytest.raises(InputError, match=r"labels.*, row \d+: .*several labels.*use one"):
            open_tables(save(tmp_path / kind, **{kind: labels}))


def test_a_comma_in_the_name_of_a_class_is_no_list(tmp_path: Path) -> None:
    names = ["Smith, John", "Theory; Practice", "cs.LG", "a b"]
    labels = pd.DataFrame({"label": [names[c] for c in graph()["y"]]})
    assert open_tables(save(tmp_path / "own", labels=labels)).num_classes == 4


@pytest.mark.parametrize("count", [0, -1, 2.5, True, 2**24 + 1])
def test_a_number_of_classes_is_checked_at_every_door(count: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="num_classes: expected a whole number from 1"):
        open_tables(save(tmp_path / "own"), num_classes=count)


TWO_KINDS = ["user_id,item_id", "author,paper", "userId,MovieID", "drug,protein", "user,item_id"]
ONE_KIND = [
    "paper_id_1,paper_id_2",
    "citing,cited",
    "source_id,target_id",
    "src,dst",
    "from_node,to_node",
    "FromNodeId,ToNodeId",
    "citing_paper_id,cited_paper_id",
    "u,v",
    "follower,followee",
    "id1,id2",
    "papers,paper",
]


@pytest.mark.parametrize("header", TWO_KINDS)
def test_two_kinds_of_nodes_in_one_id_space_are_refused(header: str, tmp_path: Path) -> None:
    src, dst = graph()["edges"]
    columns = header.split(",")
    edges = pd.DataFrame({columns[0]: src, columns[1]: dst % 20, "rating": 5})
    folder = save(tmp_path / "own", edges=edges)
    with pytest.raises(InputError, match=f"'{columns[0]}' and '{columns[1]}'.*two kinds"):
        open_tables(folder, edge_columns=columns)
    with pytest.raises(InputError, match=f"--edge-columns {header}, if these two kinds"):
        open_tables(folder)
    apart = pd.DataFrame({columns[0]: src % 40, columns[1]: 40 + dst % 20})
    folder = save(tmp_path / "apart", edges=apart)
    assert open_tables(folder, edge_columns=columns).num_edges == 200


@pytest.mark.parametrize("header", ONE_KIND)
def test_two_ends_of_one_kind_are_accepted(header: str, tmp_path: Path) -> None:
    columns = header.split(",")
    edges = pd.DataFrame(dict(zip(columns, graph()["edges"], strict=True)))
    folder = save(tmp_path / "own", edges=edges)
    assert open_tables(folder, edge_columns=columns).num_edges == 200


def multilabel() -> list[tuple[Any, str]]:
    y = graph()["y"]
    many = (np.random.default_rng(1).random((NODES, 5)) < 0.5).astype(int)
    many[0] = 1
    onehot = np.eye(4, dtype="f4")[y]
    frame = pd.DataFrame(many, columns=list("vwxuz"))
    return [
        (many, r"several labels.*labels\[:, 0\]"),
        (frame, "several labels.*--label-columns v"),
        (frame.assign(node_id=range(NODES)), "several labels.*--label-columns node_id,v"),
        (frame.astype(bool), "several labels"),
        (onehot, r"one-hot.*argmax\(axis=1\)"),
        (pd.DataFrame(onehot), "one-hot.*argmax"),
        (pd.DataFrame(onehot.astype(bool), columns=list("abcd")), "one-hot.*argmax"),
        (np.random.default_rng(0).normal(size=NODES), "row 0: .*classes.*digitize"),
        (pd.DataFrame({"label": np.linspace(0, 1, NODES)}), r"row 1: .*classes.*digitize"),
        (np.random.default_rng(0).normal(size=(NODES, 3)), r"several .*labels\[:, 0\]"),
    ]


@pytest.mark.parametrize("number", range(len(multilabel())))
def test_labels_that_are_no_classes_are_refused_with_the_way_out(
    number: int, tmp_path: Path
) -> None:
    labels, sentence = multilabel()[number]
    with pytest.raises(InputError, match=sentence):
        open_tables(save(tmp_path / "own", labels=labels))


def test_true_and_false_are_two_classes(tmp_path: Path) -> None:
    flags = graph()["y"] > 1
    for number, labels in enumerate((flags, pd.DataFrame({"label": flags}))):
        source = open_tables(save(tmp_path / str(number), labels=labels))
        np.testing.assert_array_equal(np.concatenate(list(source.label_chunks())), flags)


def test_the_mistakes_of_one_conversion_are_reported_together(tmp_path: Path) -> None:
    columns = pd.DataFrame({"paper_id": range(NODES), "a": 1.5, "b": 2.5})
    edges = pd.DataFrame({"cites": [1], "by": [2]})
    folder = save(tmp_path / "own", features=columns, edges=edges, labels=descending())
    with pytest.raises(InputError) as error:
        open_tables(folder, num_classes=0, id_column="nobody")
    text = str(error.value)
    for words in ("features.csv", "edges.csv", "labels.csv", "num_classes", "nobody"):
        assert words in text
    assert len(text.splitlines()) == 6
    masks = {"train": np.ones(NODES + 1, bool), "valid": np.zeros(NODES + 1, int)}
    folder = save(tmp_path / "values", labels=graph()["y"] + 0.5, **masks)
    with pytest.raises(InputError) as error:
        open_tables(folder)
    text = str(error.value)
    assert f"train.npy: found a mask of {NODES + 1} rows, expected {NODES}" in text
    assert f"valid.npy: found a mask of {NODES + 1} rows, expected {NODES}" in text
    assert "labels.npy" in text


def test_wrong_splits_are_reported_together(tmp_path: Path) -> None:
    splits = {"train": np.array([1, 1]), "valid": np.array([1, 2])}
    with pytest.raises(InputError, match=r"(?s)train.npy: .*repeats.*valid.npy: .*no node of tr"):
        convert(save(tmp_path / "own", **splits), tmp_path / "store", progress=False)


def test_values_from_one_raise_the_question(tmp_path: Path) -> None:
    edges = graph()["edges"] + 1
    edges[0, 0] = NODES
    folder = save(tmp_path / "e", edges=edges)
    with pytest.raises(InputError, match="found 60; do they begin at 1"):
        next(open_tables(folder).edge_chunks(100))
    with pytest.raises(InputError, match="found 60; do they begin at 1"):
        open_tables(save(tmp_path / "t", test=np.arange(1, NODES + 1)))
    with pytest.raises(InputError, match="found 4; do they begin at 1"):
        open_tables(save(tmp_path / "y", labels=graph()["y"] + 1), num_classes=4)


def test_labels_from_one_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_tables(save(tmp_path / "own", labels=graph()["y"] + 1))
    assert "labels.npy: labels from 1 to 4; do they begin at 1?" in capsys.readouterr().err


def test_a_value_of_another_kind_is_named_by_its_row(tmp_path: Path) -> None:
    x = graph()["x"].astype(object)
    x.loc[37, "b"] = "oops"
    with pytest.raises(InputError, match="column 'b', row 37: expected a number, found 'oops'"):
        features(save(tmp_path / "own", features=x))
    text = "source,target\n" + "1,2\n" * 30 + "3\n" + "1,2\n" * 9
    with pytest.raises(InputError, match=r"edges.csv, row 30: expected 2 columns, found 1: '3'"):
        features(save(tmp_path / "edges", edges=text), features="degree")


def test_an_empty_file_is_an_empty_split(tmp_path: Path) -> None:
    folder = save(tmp_path / "own", valid=None)
    with pytest.raises(InputError, match=r"valid.* empty file .*valid.csv"):
        open_tables(folder)
    (folder / "valid.csv").touch()
    store: Store = convert(folder, tmp_path / "store", progress=False)
    assert store.num_seeds["valid"] == 0


def test_arrays_in_memory_are_refused_with_the_same_words() -> None:
    g = graph()
    x = g["x"].to_numpy()
    splits = g["splits"]
    wrong = [
        ({"y": np.zeros((NODES, 3))}, r"y: .*multi-label.*y\[:, 0\]"),
        ({"y": np.eye(4)[g["y"]]}, r"one-hot labels; use y.argmax"),
        ({"edge_index": g["edges"] + 1}, "do they begin at 1"),
        ({"y": g["y"] + 1, "num_classes": 4}, "do they begin at 1"),
        ({"num_classes": 0}, "num_classes: expected a whole number from 1"),
        ({"splits": {**splits, "train": np.ones(NODES + 1, int)}}, "mask of 61 values for 60"),
        ({"splits": {**splits, "test": np.arange(1, NODES + 1)}}, "do they begin at 1"),
    ]
    arrays = {"name": "own", "edge_index": g["edges"], "x": x, "y": g["y"], "splits": splits}
    for changed, sentence in wrong:
        with pytest.raises(InputError, match=sentence):
            from_arrays(**{**arrays, **changed})


@pytest.mark.parametrize("values", [lambda y: y, lambda y: 2.5 - y, lambda y: np.eye(4)[y]])
def test_labels_among_features_in_memory_are_refused(values: Any) -> None:
    g = graph()
    x = np.column_stack([g["x"].to_numpy(), values(g["y"])])
    source = from_arrays("own", g["edges"], x, g["y"], g["splits"])
    with pytest.raises(InputError, match=r"column 2.*labels.*numpy.delete\(x, \[2"):
        refuse_leaks(source)


def test_labels_from_one_of_a_data_are_said(tmp_path: Path) -> None:
    g = graph()
    lines: list[str] = []
    values = {"edge_index": g["edges"], "x": g["x"].to_numpy(), "y": g["y"] + 1}
    Store.from_data(values, tmp_path / "store", splits=g["splits"], say=lines.append)
    assert "labels from 1 to 4; do they begin at 1" in lines[0]
