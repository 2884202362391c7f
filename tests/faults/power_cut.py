"""What a disk may hold after a power cut, from a record of the calls on its files.

The model is a journal, as ext4's and XFS's: names change in the order of the calls, and an fsync
makes all changes of names before it durable. The content of a file is durable as of its last fsync;
what came later may be missing, zeros, or half of it.
"""

from dataclasses import dataclass
from pathlib import Path

CONTENTS = ("missing", "zeros", "half")


@dataclass
class Call:
    """A call of the record, with the content that its file had then."""

    kind: str  # S: fsync, C: create, R: rename, U: unlink or rmdir, M: mkdir
    path: str
    target: str
    content: bytes


def read_record(counter: Path) -> list[Call]:
    """Return the calls that the preloaded library noted beside its counter."""
    calls = []
    log = counter.with_name(f"{counter.name}.log")
    for line in log.read_text().splitlines():
        kind, number, path, target = line.split("\t")
        copy = counter.with_name(f"{counter.name}.{number}")
        calls.append(Call(kind, path, target, copy.read_bytes() if copy.exists() else b""))
        copy.unlink(missing_ok=True)
    log.unlink()
    return calls


class _File:
    is_folder = False
    durable: bytes | None = None  # as of its last fsync
    content = b""  # as last seen


def _rename(names: dict[str, _File], path: str, target: str) -> None:
    for name in [name for name in names if name == path or name.startswith(f"{path}/")]:
        names[target + name.removeprefix(path)] = names.pop(name)


def restore(folder: Path, calls: list[Call], num_calls: int, num_names: int, content: str) -> None:
    """Make `folder`, empty now, what a cut after `num_calls` calls leaves of it.

    Of the changes of names the first `num_names` calls are on the disk, and `content` (one of
    CONTENTS) is what has become of bytes that were not synced.
    """
    names: dict[str, _File] = {}
    durable: dict[str, _File] = {}
    for number, call in enumerate(calls[:num_calls], 1):
        if call.kind in "CM":
            names[call.path] = _File()
            names[call.path].is_folder = call.kind == "M"
        elif call.kind == "U":
            names.pop(call.path, None)
        elif call.kind == "R":
            _rename(names, call.path, call.target)
            if call.target in names:
                names[call.target].content = call.content
        elif call.path in names:
            names[call.path].durable = call.content
            names[call.path].content = call.content
        if number == num_names:
            durable = dict(names)
    for path, file in sorted(durable.items()):
        if file.is_folder:
            Path(path).mkdir(parents=True, exist_ok=True)
            continue
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        size = len(file.content)
        lost = {"missing": b"", "zeros": bytes(size), "half": file.content[: size // 2]}
        Path(path).write_bytes(lost[content] if file.durable is None else file.durable)


def cuts(calls: list[Call]) -> list[tuple[int, int, str]]:
    """List `restore`'s arguments for every state: all names so far, or those of the last fsync."""
    states = []
    last_sync = 0
    for number, call in enumerate(calls, 1):
        if call.kind == "S":
            last_sync = number
        for num_names in sorted({last_sync, number}):
            states += [(number, num_names, content) for content in CONTENTS]
    return states
