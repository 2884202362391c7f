"""Three graphs of what Debian and Python ship on this machine, written as a user's files.

| graph | nodes | edges | label | features: hashed counts of |
|---|---|---|---|---|
| packages | Debian packages | depends on, recommends | section | words of name and description |
| imports | files of Python | imports | distribution | names in the file |
| words | words of docstrings | next to each other | package that uses it most | letters |

Each has a random 60/20/20 split of its nodes.
"""

import functools
import itertools
import os
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.feature_extraction.text import HashingVectorizer

DPKG = Path("/var/lib/dpkg")
NUM_FEATURES = 64
SPLITS = ("train", "valid", "test")
Table = tuple[pd.DataFrame, pd.DataFrame]  # nodes: node_id, label, split, f0, ...; edges


def add_features(nodes: pd.DataFrame, texts: Iterable[str], **how: object) -> pd.DataFrame:
    """Append hashed counts of the words of each node's text, of length 1, or of its letters."""
    counts = HashingVectorizer(n_features=NUM_FEATURES, alternate_sign=False, **how)
    values = counts.transform(texts).toarray().astype(np.float32).round(4)
    names = [f"f{i}" for i in range(NUM_FEATURES)]
    return pd.concat([nodes.reset_index(drop=True), pd.DataFrame(values, columns=names)], axis=1)


def random_split(size: int) -> np.ndarray:
    return np.random.default_rng(0).choice(SPLITS, size, p=[0.6, 0.2, 0.2])


def frequent(labels: pd.Series, least: int) -> pd.Series:
    """Which labels come at least that often."""
    return labels.map(labels.value_counts()) >= least


# --- Debian's packages


@functools.cache
def package_fields() -> list[dict[str, str]]:
    """The fields of all packages that apt knows, else of the installed ones; [] without Debian."""
    text = ""
    try:
        text = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return []
    if not text and (DPKG / "status").is_file():
        text = (DPKG / "status").read_text()
    fields_of = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", stanza, re.MULTILINE))
        if {"Package", "Section", "Description"} <= fields.keys():
            fields_of[fields["Package"]] = fields
    return list(fields_of.values())


def packages() -> Table:
    known = package_fields()
    nodes = pd.DataFrame(
        {
            "node_id": [fields["Package"] for fields in known],
            "label": [fields["Section"].rpartition("/")[2] for fields in known],
        }
    )
    nodes["split"] = random_split(len(nodes))
    texts = [f"{fields['Package']} {fields['Description']}" for fields in known]
    edges = []
    for fields in known:
        for each in f"{fields.get('Depends', '')}, {fields.get('Recommends', '')}".split(","):
            other = re.match(r"\s*([a-z0-9][a-z0-9+.-]+)", each)  # of alternatives the first
            if other:  # it may be a virtual package, which no row describes
                edges.append((fields["Package"], other[1]))
    nodes = add_features(nodes, texts)
    common = nodes[frequent(nodes["label"], 20)]
    return common, pd.DataFrame(edges, columns=["source", "target"])


# --- Python's files


def python_files(most: int) -> list[tuple[str, str, str]]:
    """(module, distribution, text) of library files, at most so many of each distribution."""
    roots = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib")}
    texts = []
    count: Counter[str] = Counter()
    for root in sorted(roots):
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(set(folders) - {"site-packages", "__pycache__", "test", "tests"})
            for file in sorted(files):
                path = Path(folder, file)
                module = ".".join(path.relative_to(root).with_suffix("").parts)
                top = module.partition(".")[0]
                if path.suffix != ".py" or count[top] >= most:
                    continue
                count[top] += 1
                name = module.removesuffix(".__init__")
                texts.append((name, top, path.read_text(errors="replace")))
    return texts


_IMPORT = re.compile(r"^\s*(?:from\s+(\.*[\w.]*)\s+import\s+([\w, ]+)|import\s+([\w., ]+))", re.M)


def imported(module: str, text: str) -> Iterable[str]:
    """The modules that a file's import lines name."""
    for base, names, plain in _IMPORT.findall(text):
        dots = len(base) - len(base.lstrip("."))
        parts = module.split(".")[:-dots] if dots else []
        base = ".".join([*parts, *filter(None, [base.lstrip(".")])])
        yield from (name.split()[0] for name in plain.split(",") if name.strip())
        yield from (f"{base}.{name.split()[0]}" for name in names.split(",") if name.strip())
        yield base


def imports() -> Table:
    files = python_files(most=150)
    nodes = pd.DataFrame({"node_id": [f[0] for f in files], "label": [f[1] for f in files]})
    # an import's line would tell the label
    texts = [_IMPORT.sub("", text)[:20_000] for _, _, text in files]
    nodes["split"] = random_split(len(nodes))
    nodes = add_features(nodes, texts)
    nodes = nodes[~nodes["node_id"].duplicated() & frequent(nodes["label"], 30)]
    known = set(nodes["node_id"])
    edges = {
        (module, other)
        for module, _, text in files
        for other in imported(module, text)
        if module in known and other in known and module != other
    }
    return nodes, pd.DataFrame(sorted(edges), columns=["source", "target"])


def words() -> Table:
    used: Counter[tuple[str, str]] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for _, top, text in python_files(most=60):
        for _, docstring in re.findall(r'("""|\'\'\')(.{20,2000}?)\1', text, re.DOTALL):
            spoken = re.findall(r"[a-z]{3,}", docstring.lower())
            used.update((word, top) for word in spoken)
            pairs.update(itertools.pairwise(spoken))
    counts = pd.Series(used)
    counts = counts[counts >= 3].sort_values(ascending=False, kind="stable")
    owners = counts[~counts.index.get_level_values(0).duplicated()]
    nodes = pd.DataFrame(list(owners.index), columns=["node_id", "label"])
    nodes["split"] = random_split(len(nodes))
    nodes = add_features(nodes, nodes["node_id"], analyzer="char_wb", ngram_range=(2, 4))
    nodes = nodes[frequent(nodes["label"], 60)]
    known = set(nodes["node_id"])
    edges = [(a, b) for a, b in pairs if a != b and a in known and b in known]
    return nodes, pd.DataFrame(edges, columns=["source", "target"])


GRAPHS: dict[str, Callable[[], Table]] = {"packages": packages, "imports": imports, "words": words}


# --- the files of a user


def write(name: str, nodes: pd.DataFrame, edges: pd.DataFrame, folder: Path) -> None:
    """Write a graph in its formats; names decide their roles, but for "words"."""
    folder.mkdir(parents=True)
    features = nodes.filter(regex=r"^f\d+$")
    if name == "packages":  # one table of nodes, and edges to names without a row
        nodes.to_csv(folder / "nodes.csv", index=False)
        edges.to_csv(folder / "edges.csv", index=False)
        (folder / "dataset.yaml").write_text("drop_unknown: true\n")
    elif name == "imports":  # a file for each role, of four kinds
        edges.to_csv(folder / "edges.tsv", index=False, sep="\t")
        np.save(folder / "features.npy", features.to_numpy())
        nodes[["node_id"]].to_csv(folder / "nodes.csv", index=False)
        nodes[["node_id", "label"]].to_csv(folder / "labels.csv.gz", index=False)
        nodes[["node_id", "split"]].to_csv(folder / "splits.csv", index=False)
    else:  # an edge list with comments; features in a column of lists
        lines = "".join(f"{a}\t{b}\n" for a, b in edges.itertuples(index=False))
        (folder / "edges.txt").write_text(f"# neighbors in docstrings\nfrom\tto\n{lines}")
        lists = pa.FixedSizeListArray.from_arrays(features.to_numpy().ravel(), NUM_FEATURES)
        table = pa.table({"node_id": nodes["node_id"].tolist(), "values": lists})
        table = table.append_column("label", pa.array(nodes["label"].tolist()))
        table = table.append_column("split", pa.array(nodes["split"].tolist()))
        pq.write_table(table, folder / "nodes.parquet")
