"""Files of a data set, found by their names in a user's folder or by the layout of a published data
set. Their content is not read."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError, Problems, unknown_name
from ...files import StrPath, home, whereabouts
from ...graph.store import is_store
from ...graph.store_format import META, SPLITS, nearby
from .formats import READABLE, ending, files_of, format_of, is_parts

ROLE_NAMES = {  # for each role, names of its file without their endings
    "edges": ("edges", "edge_index"), "features": ("features", "x"), "labels": ("labels", "y"),
    "train": ("train", "train_mask"), "valid": ("valid", "val", "valid_mask", "val_mask"),
    "test": ("test", "test_mask"), "splits": ("splits",), "nodes": ("nodes",),
    "targets": (),  # read only if the user names the file
}  # fmt: skip
_PREFERRED = (".npy", ".parquet", ".csv", ".csv.gz")  # before the same name in another format
# data sets to which OGB's reader adds the reverse of each edge
_OGB_BOTH_WAYS = ("ogbn_products", "ogbn_proteins")
_FEW = 8  # names of files in a message
SPLIT_DICT = "split_dict.pt"  # MAG240M's file of splits
OPTIONS = "dataset.yaml"  # options of a conversion, see `sources.options`


def split_folder(path: Path) -> Path:
    """Return the folder with the files of the splits: split/time, else the only one in split/."""
    folders = [entry for entry in (path / "split").glob("*") if entry.is_dir()]
    time = path / "split" / "time"
    if time in folders:
        return time
    if len(folders) != 1:
        names = sorted(entry.name for entry in folders)
        raise InputError(
            f"{path / 'split'}: expected a folder named time, or just one, found {names}"
        )
    return folders[0]


@dataclass(frozen=True)
class _Layout:
    """Folder layout of published data sets.

    Attributes:
        files: for each role, possible paths of its file in order of preference.
        splits: returns the folder with the files of the splits. If None, a file `splits` has them;
            without it, train, valid and test are 60, 20 and 20 % of the nodes, in order.
        left_out: the layout's content that a store does not keep.
    """

    files: Mapping[str, tuple[str, ...]]
    splits: Callable[[Path], Path] | None
    left_out: str = ""

    def candidates(self, folder: Path, role: str) -> list[Path]:
        if role in SPLITS and self.splits is not None:
            return [self.splits(folder) / f"{role}.csv.gz"]
        return [
            path for path in [folder / name for name in self.files.get(role, ())] if path.is_file()
        ]


# OGB's csv layout, as ogbn-arxiv has it (snap-stanford/ogb, docs of read_graph_pyg).
OGB_CSV = _Layout(
    {
        "edges": ("raw/edge.csv.gz",),
        "features": ("raw/node-feat.csv.gz",),
        "labels": ("raw/node-label.csv.gz",),
    },
    split_folder,
)
# ogbn-mag (ogb/io/read_graph_raw.py). Of its nodes only the papers are read, which have the
# features, the labels and the splits.
OGB_MAG = _Layout(
    {
        "edges": ("raw/relations/paper___cites___paper/edge.csv.gz",),
        "features": ("raw/node-feat/paper/node-feat.csv.gz",),
        "labels": ("raw/node-label/paper/node-label.csv.gz",),
    },
    lambda folder: split_folder(folder) / "paper",
    "authors, institutions and fields of study",
)
# MAG240M (ogb/lsc/mag240m.py). Only its papers are read, too.
_MAG240M = _Layout(
    {
        "edges": ("processed/paper___cites___paper/edge_index.npy",),
        "features": ("processed/paper/node_feat.npy",),
        "labels": ("processed/paper/node_label.npy",),
        "splits": (SPLIT_DICT,),
    },
    None,
    "authors, institutions, and test, whose labels are not published",
)
# IGB-homogeneous. Its loader (IllinoisGraphBenchmark/IGB-Datasets, igb/dataloader.py) takes 19
# classes by default, and the splits from the order of the nodes.
_IGB = _Layout(
    {
        "edges": ("processed/paper__cites__paper/edge_index.npy",),
        "features": ("processed/paper/node_feat.npy",),
        "labels": (
            "processed/paper/node_label_19.npy",
            "processed/paper/node_label_2K.npy",
            "processed/paper/node_label_2983.npy",
        ),
    },
    None,
)
LAYOUTS = (OGB_CSV, OGB_MAG, _MAG240M, _IGB)
# In IGB's size "full", only the first nodes have a label: this many (igb/dataloader.py).
_IGB_LABELLED = {"node_label_19.npy": 227_130_858, "node_label_2K.npy": 157_675_969}
_IGB_FULL = 269_346_174


def layout_of(folder: Path) -> tuple[_Layout | None, Path]:
    """Return a folder's layout, if known, and root; a folder in the root, such as raw, stands for
    it."""
    for layout in LAYOUTS:
        edges = Path(layout.files["edges"][0])
        roots = [folder, folder.parent] if folder.name == edges.parts[0] else [folder]
        for root in roots:
            if (root / edges).is_file():
                return layout, root
    return None, folder


def splits_in_order(num_nodes: int, labels: Path) -> dict[str, tuple[int, int]]:
    """Return (first node, last node + 1) of each split, for a layout without files of splits."""
    is_full = num_nodes == _IGB_FULL
    labelled = _IGB_LABELLED.get(labels.name, num_nodes) if is_full else num_nodes
    train = int(labelled * 0.6)
    bounds = (0, train, train + int(labelled * 0.2), labelled)
    return dict(zip(SPLITS, itertools.pairwise(bounds), strict=True))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _stem(path: Path) -> str:
    return path.name[: len(path.name) - len(ending(path.name))]


def _named(entries: Iterable[Path], role: str) -> list[Path]:
    """Return the files and folders of parts that have a role's names, in the order of these names.
    Files in a format of `_PREFERRED` come first."""
    files = [
        entry
        for name in ROLE_NAMES[role]
        for entry in entries
        if _stem(entry) == name and (is_parts(entry) or (entry.is_file() and format_of(entry)))
    ]
    return sorted(files, key=lambda path: not _is_preferred(path))


def _is_preferred(path: Path) -> bool:
    return path.is_file() and ending(path.name) in _PREFERRED


def is_tables(folder: StrPath) -> bool:
    """Whether a folder holds a user's own files or a published layout, complete or not.

    It needs edges, features or a `dataset.yaml` without raw/data.npz; no content is read.
    """
    folder = Path(folder)
    if is_store(folder) or not folder.is_dir():
        return False
    entries = _entries(folder)
    return (
        ((folder / OPTIONS).is_file() and not (folder / "raw" / "data.npz").is_file())
        or layout_of(folder)[0] is not None
        or any(_named(entries, role) for role in ("edges", "features"))
    )


def _check_pairs(
    folder: Path, own: Mapping[str, Path], files: Mapping[str, Path], problems: Problems
) -> None:
    """Refuse roles that exclude each other, and a file of targets that also has another role."""
    if "splits" in files and {*SPLITS} & {*files}:
        problems.add(f"{folder}: expected either splits or train, valid and test, found both")
    if {"labels", "targets"} <= {*own}:
        problems.add(f"{folder}: expected either labels or targets, found both")
    if files.get("targets") in [file for role, file in files.items() if role != "targets"]:
        problems.add(f"{files['targets']}: expected targets in a file of their own")


def find_files(
    folder: StrPath,
    chosen: Mapping[str, StrPath | None] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Path]:
    """Return the file of each role: the `chosen` one, or the one in `folder` with the role's name.

    A file may also be a folder of parts, or a pattern of their names. `say` is called with lines
    about files that are not read because a role has several, and about a known layout.
    """
    layout, folder = layout_of(home(folder))
    own = {role: home(file) for role, file in (chosen or {}).items() if file is not None}
    unknown = [role for role in own if role not in ROLE_NAMES]
    if unknown:
        raise InputError(f"files: {unknown_name(unknown[0], ROLE_NAMES, 'role of a file')}")
    done = replaced_roles(own)
    entries = _entries(folder)
    files = dict[str, Path]()
    problems = Problems()
    for role in [role for role in ROLE_NAMES if role not in done]:
        try:
            if role in own:
                candidates = [_checked(own[role], role)]
            elif layout is None:
                candidates = _only_named(entries, role, folder)
            else:
                candidates = layout.candidates(folder, role)
        except InputError as error:
            problems.add(str(error))
            done.add(role)  # its file is wrong, not missing
            continue
        if candidates:
            files[role] = candidates[0]
        if len(candidates) > 1:
            names = ", ".join(file.name for file in candidates[1:])
            say(f"{folder}: {candidates[0].name} is read, not {names}; --{role} names another")
    _use_table_of_nodes(files, done)
    _check_pairs(folder, own, files, problems)
    if layout is not None:
        _say_layout(layout, folder, own, say)
    required = ["edges", "features", "labels"]
    if "splits" not in files and (layout is not _IGB or {*SPLITS} & {*files}):
        required += SPLITS  # IGB without files of splits: from the order of the nodes
    missing = [role for role in required if role not in {*files, *done}]
    if missing:
        problems.add(_missing(folder, missing, entries))
    problems.refuse()
    return files


def _say_layout(
    layout: _Layout, folder: Path, own: Mapping[str, Path], say: Callable[[str], object]
) -> None:
    """Tell the user which data sets OGB gives reverse edges, and which content is left out."""
    if folder.name in _OGB_BOTH_WAYS and "edges" not in own:
        name = folder.name.replace("_", "-")
        say(f"{folder}: OGB adds reverse edges to {name}: add --undirected")
    if layout.left_out:
        say(f"{folder}: papers and their citations are read, not {layout.left_out}")


def replaced_roles(own: Mapping[str, Path]) -> set[str]:
    """Return the roles whose files are not looked for, because the user's choices replace them."""
    roles = set[str]()
    if str(own.get("features")) in ("ones", "degree"):
        roles.add("features")
    if ("labels" in own) != ("targets" in own):
        roles.add("labels" if "targets" in own else "targets")
    names_splits = "splits" in own
    if names_splits != bool({*SPLITS} & {*own}):  # the user's files replace those in the folder
        roles |= {*SPLITS} if names_splits else {"splits"}
    return roles


def _use_table_of_nodes(files: dict[str, Path], done: Collection[str]) -> None:
    """Use the table of nodes for features, labels and splits that have no file of their own."""
    nodes = files.get("nodes")
    if nodes is None or format_of(files_of(nodes)[0]) not in ("text", "parquet", "arrow"):
        return
    roles = ["features", "labels"]
    if not {*SPLITS} & {*files, *done}:
        roles.append("splits")
    files |= {role: nodes for role in roles if role not in {*files, *done}}


def _only_named(entries: Iterable[Path], role: str, folder: Path) -> list[Path]:
    """Return the files that have a role's names.

    Several are refused unless exactly one has a preferred format: nothing else tells which to read.
    """
    files = _named(entries, role)
    if len(files) > 1 and _is_preferred(files[0]) == _is_preferred(files[1]):
        names = ", ".join(file.name for file in files)
        raise InputError(f"{folder}: expected one file of {role}, found {names}")
    return files


def _missing(folder: Path, missing: list[str], entries: list[Path]) -> str:
    """Return the message about roles that have no file."""
    hints = [
        f"{entry.name}: {_remedy(entry, role)}"
        for role in missing
        for entry in entries
        if entry.name.split(".")[0] in ROLE_NAMES[role]
    ]
    if "features" in missing:
        hints.append("without features convert with --features ones, or degree")
    if 0 < len({*missing} & {*SPLITS}) < len(SPLITS):
        hints.append(f"for a split without nodes, an empty file does: {missing[-1]}.csv")
    expected = f"expected files of {', '.join(missing)} ({READABLE})"
    if not folder.is_dir():
        return f"{folder}: {expected}, found no such folder{whereabouts()}"
    return "; ".join([f"{folder}: {expected}, found none", *hints])


def _checked(file: Path, role: str) -> Path:
    """Return a file that the user named; refuse a missing file or an unknown format."""
    if is_parts(file) or (file.is_file() and format_of(file)):
        return file
    if not file.exists():
        raise InputError(f"{file}: expected a file of {role}, found none{whereabouts()}")
    raise InputError(f"{file}: expected a file of {role} ({READABLE}); {_remedy(file, role)}")


def _remedy(file: Path, role: str) -> str:
    """Return advice on how to get a file of this role that can be read."""
    if file.suffix in (".pt", ".pth"):
        return f"in Python: np.save({file.stem + '.npy'!r}, torch.load({file.name!r}).numpy())"
    if file.is_dir():
        return f"expected parts of {role} in this folder, found none"
    return "save it in one of these formats"


def not_a_data_set(path: Path) -> InputError:
    """Return the error for a path without a data set; it names the content and the remedy."""
    hint = nearby(path)
    if path.is_file():
        if path.suffix in (".pt", ".pth"):
            return InputError(
                f"{path}: expected a folder, found a file of torch; {_from_torch(path)}"
            )
        if "?" not in hint and format_of(path):
            hint = f"; name its folder, and the file with --edges {path}"
        elif "?" not in hint:
            hint = "; unpack an archive; a graph in Python becomes a store by Store.from_data"
        return InputError(f"{path}: expected a data set folder, found a file{hint}")
    if not path.is_dir():
        return InputError(f"{path}: expected a data set folder, found no such folder{hint}")
    if hint:
        return InputError(f"{path}: expected a data set, found none{hint}")
    return InputError(f"{path}: expected a data set, {_content(path)}")


def _content(folder: Path) -> str:
    """Return what a folder without a data set holds, and what to do."""
    if (folder / META).is_file():
        return "found a store; name it as the data set"
    if (folder / "data.npz").is_file() and folder.name == "raw":
        return f"found the folder raw of OGB's binary layout; name {folder.parent}"
    if (folder / "raw" / "triplet-type-list.csv.gz").is_file():
        return "found a graph of several kinds of nodes in OGB's layout; only one kind can be used"
    entries = [entry for entry in _entries(folder) if not entry.name.startswith(".")]
    data = [
        file
        for file in [*folder.glob("*.pt"), *(folder / "processed").glob("*.pt")]
        if not file.name.startswith("pre_")
    ]
    if data:
        return f"found {data[0].relative_to(folder)}, a file of torch; {_from_torch(data[0])}"
    names = [entry.name + "/" * entry.is_dir() for entry in entries]
    content = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" * (len(names) > _FEW))
    inner = [
        entry
        for entry in entries
        if is_store(entry) or is_tables(entry) or (entry / "raw" / "data.npz").is_file()
    ]
    if inner:
        return f"found {content or 'nothing'}; name {inner[0]}"
    if any(map(format_of, entries)):
        hint = (
            "name them one by one: --edges FILE --features FILE --labels FILE ..., or rename them"
        )
    else:
        hint = "write one with ogbnlib.write_raw, or Store.from_data"
    return (
        f"found {content or 'nothing'}; "
        "expected in it are edges, features, labels, train, valid and test, or raw/data.npz; "
        f"{hint}"
    )


def _from_torch(file: Path) -> str:
    """Return the Python code that makes a store from a `Data` saved by torch."""
    folder = file.parent.parent if file.parent.name == "processed" else Path(file.stem)
    store = f"{folder.name}_store"
    return (
        f"in Python, if you trust the file: "
        f"ogbnlib.Store.from_data(torch.load({str(file)!r}, weights_only=False), {store!r}); "
        f"if it is (data, slices) of a PyG data set, Store.from_data(dataset[0], {store!r})"
    )
