"""The command line's options, and its commands that create and check data sets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import InputError, printable
from .parameters import no_value, parse_assignments, read_parameters

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Convert data, plan memory, train, and explain kills.\n\nEach command has its own --help.",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE, once per parameter.")
]
ConfigFile = Annotated[
    Path | None, typer.Option(help="YAML of parameters and memory_limit; --set overrides it.")
]
LimitBy = Annotated[str, typer.Option(help="auto, cgroup v2, cgroup v1, systemd-run or watchdog.")]
MemoryLimit = Annotated[
    str | None, typer.Option(help='Such as "4 GB"; by default there is no limit.')
]
DataDir = Annotated[Path, typer.Option(help="Folder of official data sets.")]
RunDir = Annotated[Path, typer.Argument(help="The folder of a run.")]


def say(text: object) -> None:
    """Print a message on standard error."""
    typer.echo(printable(text), err=True)


def show(value: Mapping[str, object], text: str, as_json: bool, *, err: bool = False) -> None:
    """Print the text, on standard error with `err`; or with `as_json` print the value as JSON."""
    typer.echo(json.dumps(value, indent=2) if as_json else printable(text), err=err and not as_json)


def read_options(
    config: Path | None, pairs: list[str] | None, limit: str | None
) -> tuple[dict[str, Any], str | None]:
    """Return parameters and memory limit of the options, which override those of the file."""
    values = read_parameters(config) if config else {}
    limit_in_file = no_value(values.pop("memory_limit", None))  # "none" in YAML is None
    return {**values, **parse_assignments(pairs or [])}, limit_in_file if limit is None else limit


def _print_store(store: Any, as_json: bool) -> None:  # of a `Store`
    from .graph.summary import summarized

    facts = {
        "path": str(store.path),
        "num_nodes": store.num_nodes,
        "num_edges": store.num_edges,
        "num_features": store.num_features,
        "num_classes": store.num_classes,
        "bytes": store.nbytes,
        "undirected": store.undirected,
        "splits": dict(store.num_seeds),
        **store.summary,  # counts of the conversion, such as dropped_edges
    }
    show(facts, summarized(store), as_json)


@app.command()
def synth(
    directory: Annotated[Path, typer.Argument(help="The new data set's folder.")],
    scale: Annotated[
        float, typer.Option(help="1.0 is the size of ogbn-papers100M, 0.01 has 1.1M nodes.")
    ] = 0.01,
    format: Annotated[
        str, typer.Option(help="store: ready to train from; raw: OGB's own layout.")
    ] = "store",
    seed: Annotated[int, typer.Option(help="The same seed gives the same files.")] = 0,
    undirected: Annotated[
        bool, typer.Option("--undirected", help="Store only: add reverse edges.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a synthetic data set like ogbn-papers100M, in memory bounded by a chunk."""
    from .sources.synth import synthesize, synthesize_store

    if format == "store":
        store = synthesize_store(
            directory, scale=scale, seed=seed, undirected=undirected, progress=not as_json
        )
        return _print_store(store, as_json)
    if format != "raw":
        raise InputError(f"--format: expected raw or store, got {format!r}")
    if undirected:
        raise InputError("--undirected: expected with --format store only, got --format raw")
    raw = synthesize(directory, scale=scale, seed=seed)
    show({"path": str(raw.path)}, f"{raw.path}: OGB's layout, {raw.num_nodes:,} nodes", as_json)


@app.command()
def download(
    name: Annotated[str, typer.Argument(help="An official name such as ogbn-arxiv.")],
    data_dir: DataDir = Path("dataset"),
    as_json: Json = False,
) -> None:
    """Download an official data set without a prompt, or continue an interrupted download."""
    from .sources.official import fetch

    folder = fetch(name, data_dir, say=say, progress=not as_json)
    show({"name": name, "path": str(folder)}, f"{folder}: the data set {name}", as_json)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of files with roles, or in OGB's layout; an official name; a store."
        ),
    ],
    store_dir: Annotated[Path, typer.Argument(help="The new store's folder.")],
    description: Annotated[
        Path | None, typer.Option(help="Roles of files and columns; default: SOURCE/dataset.yaml.")
    ] = None,
    data_dir: DataDir = Path("dataset"),
    undirected: Annotated[
        bool | None,
        typer.Option("--undirected/--directed", help="Add reverse edges, drop duplicates."),
    ] = None,
    feature_dtype: Annotated[
        str | None, typer.Option(help="float16 halves the features, int8 halves them again.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help='Such as "4 GB", page cache included.')
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a data set into a store on disk, in bounded memory.

    A folder's dataset.yaml declares the role of each column. Without it names like edges.csv and
    node_id decide. If any role stays open, `convert` writes a draft of dataset.yaml and ends.
    """
    from .sources.convert import convert as make_store
    from .sources.convert import open_source

    store = make_store(
        open_source(source, data_dir, description),
        store_dir,
        undirected=undirected,
        feature_dtype=feature_dtype,  # type: ignore[arg-type]  # `make_store` refuses other values
        memory_limit=memory_limit,
        progress=not as_json,
    )
    _print_store(store, as_json)


@app.command()
def verify(
    store_dir: Annotated[Path, typer.Argument(help="The store's folder.")], as_json: Json = False
) -> None:
    """Check all checksums, offsets and splits of a store. Exits with 1 if anything is wrong."""
    from .graph.writer import verify_store

    problems = verify_store(store_dir, progress=not as_json)
    text = "\n".join(problems) or f"{store_dir}: sound"
    show({"path": str(store_dir), "problems": problems}, text, as_json)
    raise typer.Exit(1 if problems else 0)
