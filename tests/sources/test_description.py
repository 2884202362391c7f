"""Roles are in `dataset.yaml`, canonical names decide without it, and else a draft is written."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import random_arrays
from typer.testing import CliRunner

from ogbnlib import InputError, convert, open_store
from ogbnlib.__main__ import app
from ogbnlib.sources.convert import open_source
from ogbnlib.sources.description import Options

N, E = 40, 300
ROLES = """\
files:
  cites.csv: {citing: source, cited: target}
  papers.csv: {who: id, a: feature, b: feature, topic: label}
  train.npy: train
  valid.npy: valid
  test.npy: test
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files and columns without canonical names."""
    graph = random_arrays(N, E, 2, 4)
    own = tmp_path / "own"
    own.mkdir()
    edges = pd.DataFrame(graph["edge_index"].T, columns=["citing", "cited"])
    edges.to_csv(own / "cites.csv", index=False)
    papers = pd.DataFrame({"who": range(N), "a": graph["x"][:, 0], "b": graph["x"][:, 1]})
    papers.assign(topic=graph["y"]).to_csv(own / "papers.csv", index=False)
    for split, ids in graph["splits"].items():
        np.save(own / f"{split}.npy", ids)
    return own


def run(*words: str | Path) -> tuple[int, str]:
    """Run `convert` and return its exit code and its output."""
    result = CliRunner().invoke(app, ["convert", *map(str, words)])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_declared_roles_and_options_are_used_by_every_door(folder: Path, tmp_path: Path) -> None:
    (folder / "dataset.yaml").write_text(f"{ROLES}undirected: true\nfeature_dtype: float16\n")
    store = convert(folder, tmp_path / "a", progress=False)
    assert (store.num_features, store.undirected, store.feature_dtype) == (2, True, np.float16)
    assert run(folder, tmp_path / "b", "--directed", "--feature-dtype", "float32")[0] == 0
    store = open_store(tmp_path / "b")
    assert (store.num_edges, store.undirected, store.feature_dtype) == (E, False, np.float32)


WRONG = {
    "undirectd: true": "line 1: unknown option 'undirectd': did you mean 'undirected'",
    "undirected: yes": "line 1: undirected: expected true or false, got 'yes'",
    "feature_dtype: float8": "feature_dtype: expected float16 or float32 or int8",
    "feature_dtype: Float16": "feature_dtype: expected float16 .*, got 'Float16'",
    "files: [a, b]": "line 1: .*files:",
    "undirected: true\nundirected: true": "line 2: .*undirected again",
    "files: {cites.cvs: left out}": "line 1: .*cites.cvs: .*; did you mean 'cites.csv'",
    "files: {train.npy: trian}": "train.npy: unknown role 'trian': did you mean 'train'",
    "files: {cites.csv: edges}": "line 1: cites.csv: .*of each column",
    "files: {cites.csv: {citing: sorce, cited: target}}": "'citing': unknown role 'sorce': did you mean 'source'",
    "files: {cites.csv: {citng: source, cited: target}}": "unknown column 'citng' of cites.csv: it has 'citing'",
    "files: {cites.csv: {1: source, 2: target}}": "a file without a header has `header: none`",
    "files: {papers.csv: {who: id, a: feature}}": "papers.csv, .* 'b', 'topic'",
    "files: {cites.csv: {citing: source, cited: left out}}": "file of edges.*found 1",
    ROLES + "  papers.csv: left out": "line 7: .*papers.csv again",
    ROLES.replace("topic: label", "topic: left out"): "a label, .*found 0",
    ROLES.replace("  test.npy: test\n", ""): "train, valid and test",
    ROLES.replace("feature", "left out"): "features, found none",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_line_is_named_with_the_nearest_name(folder: Path, text: str) -> None:
    (folder / "dataset.yaml").write_text(text)
    with pytest.raises(InputError, match=WRONG[text]) as error:
        open_source(folder)
    assert str(folder) in str(error.value)


def test_a_flag_in_python_is_no_text() -> None:
    with pytest.raises(InputError, match="undirected: expected true or false, got 'false'"):
        Options(undirected="false")  # type: ignore[arg-type]


def test_a_draft_is_complete_and_converts_when_edited(folder: Path, tmp_path: Path) -> None:
    code, output = run(folder, tmp_path / "store")
    draft = folder / "dataset.yaml"
    assert (code, "draft" in output, str(draft) in output) == (1, True, True)
    text = draft.read_text()
    assert "  train.npy: train  # int64 [20]\n" in text
    assert "    a: TODO  # numbers: " in text
    assert "    cited: TODO  # numbers: " in text
    with pytest.raises(InputError, match="column 'citing': unknown role 'TODO'"):
        open_source(folder)
    assert draft.read_text() == text  # what a user has edited is never overwritten
    roles = {"citing": "source", "cited": "target", "who": "id", "a": "feature", "b": "feature"}
    for name, role in {**roles, "topic": "label"}.items():
        text = text.replace(f"    {name}: TODO", f"    {name}: {role}")
    draft.write_text(text)
    assert run(folder, tmp_path / "store")[0] == 0
    assert open_store(tmp_path / "store").num_edges == E


def test_a_description_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "roles.yaml"
    with pytest.raises(InputError, match=r"draft .*roles.yaml"):
        convert(folder, tmp_path / "store", description=place)
    assert place.is_file()
    assert not (folder / "dataset.yaml").exists()
    with pytest.raises(InputError, match=r"/proc/no/dataset.yaml .*--description"):
        convert(folder, tmp_path / "store", description="/proc/no/dataset.yaml")
    place.write_text(ROLES)
    assert run(folder, tmp_path / "a", "--description", place)[0] == 0
    with pytest.raises(InputError, match="description: "):
        convert(tmp_path / "a", tmp_path / "b", description=place)
    arrays = {"edges": [[0, 1], [1, 0]], "features": [[0.5], [1]], "labels": [0, 1]}
    for name, rows in (arrays | {"train": [0], "valid": [1], "test": [1]}).items():
        np.save(tmp_path / f"{name}.npy", rows)
    with pytest.raises(InputError, match=r"typo.yaml: .* no such file.* names .* decide$"):
        convert(tmp_path, tmp_path / "b", description=tmp_path / "typo.yaml")


TWO_KINDS = "    user_id: TODO  # numbers: 1\n    item_id: TODO  # numbers: 2\n"
MANY = f"{','.join(f'word{i}' for i in range(300))},who\n" + 5 * f"{'1.0,' * 300}x\n"


@pytest.mark.parametrize(
    ("name", "content", "undecided"),
    [
        ("features.csv", "paper_id,a\n1,2\n", "    paper_id: TODO"),
        ("features.csv", "Unnamed: 0,a\n1,2\n", '    "Unnamed: 0": TODO'),
        ("nodes.csv", "id,title\n1,A long story\n", "    title: TODO"),
        ("labels.csv", "1,2\n", "    1: TODO"),
        ("train.csv", "node_id,when\n1,2\n", "    when: TODO"),
        ("edges.csv", "source,target,rating\n1,2,3\n", "    rating: TODO"),
        ("edges.csv", "user_id,item_id\n1,2\n", TWO_KINDS),
        (
            "table.csv",
            MANY,
            '    who: TODO  # text: x, x, x\n    "*": TODO  # the other 300 columns',
        ),
    ],
)
def test_what_names_do_not_decide_is_left_to_the_user(
    name: str, content: str, undecided: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match="draft"):
        open_source(tmp_path)
    assert undecided in (tmp_path / "dataset.yaml").read_text()


def test_the_index_of_a_frame_is_no_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0]}, index=[5, 3])
    frame.to_parquet(tmp_path / "features.parquet")
    with pytest.raises(InputError, match="'__index_level_0__'"):
        open_source(tmp_path)


def test_a_folder_that_is_none_brings_the_way(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.npy"):
        open_source(tmp_path)
    (tmp_path / "graph.zip").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"graph.zip: .*unpack"):
        open_source(tmp_path / "graph.zip")
    with pytest.raises(InputError, match="none: "):
        open_source(tmp_path / "none")
    (tmp_path / "processed").mkdir()
    (tmp_path / "processed" / "data.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"Store.from_data\(torch.load\('.*data.pt'"):
        open_source(tmp_path)
