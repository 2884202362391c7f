"""What an attempt of a run has come to, kept up to date while it goes on: phase, parts, largest samples.

Events and samples pass by once and are not kept, so it is as small after a week as after a minute, and the end of a run
costs no reading back.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import MB, format_bytes
from .reading import Reading

SIZES = tuple(field.name for field in fields(Reading) if field.name.endswith("_bytes"))
BOUNDARIES = ("start", "begin", "end")  # events at which one phase ends and another begins
_EPOCH = re.compile(r"((?:train\w* )?epoch)s?(?: \d+)?", re.IGNORECASE)  # phases and marks whose ends are compared
_KEPT = ("dataset", "metrics", "cuda_oom", "rank ended", "resumed", "finished")


def phase_label(name: str, info: Mapping[str, Any]) -> str:
    return f"{name} {info['epoch']}" if "epoch" in info else name


def precedes(event: Mapping[str, Any], time_s: float) -> bool:
    """Whether an event came before the sample of this moment; a phase's last moment is its own."""
    return event["time_s"] < time_s or (event["time_s"] == time_s and event["event"] != "end")


@dataclass
class PhaseNow:
    """A phase that is open, or the one that says where an attempt ended. `held_bytes`: by the run when it began."""

    name: str
    label: str
    depth: int
    held_bytes: int | None
    began_s: float = 0.0


@dataclass
class Levels:
    """What was held after each epoch, in bytes; after every second where there were more than 200, and so on."""

    sizes: list[int] = field(default_factory=list)
    stride: int = 1
    count: int = 0

    def add(self, size: int) -> None:
        if self.count % self.stride == 0:
            self.sizes.append(size)
        self.count += 1
        if len(self.sizes) > 200:
            del self.sizes[1::2]
            self.stride *= 2


@dataclass(frozen=True)
class Growth:
    """Whether what is held after each epoch, or over the time of a command that marks none, levels off or climbs.

    Attributes:
        verdict: "climbs", "levels off", or "too few epochs" (below 5).
        slope_bytes: An epoch or, without epochs, a minute; over the last two thirds: the first part fills caches.
        epochs: How many there were.
        first_bytes, last_bytes: After the first and after the last of them; without, at the ends of those two thirds.
        over_s: How long those two thirds are, without epochs.
    """

    verdict: str
    slope_bytes: float
    epochs: int
    first_bytes: int
    last_bytes: int
    over_s: float | None = None

    @classmethod
    def of(cls, levels: Levels) -> Growth:
        """By the levels after each epoch."""
        sizes = levels.sizes or [0]
        slope, climbs = _climb(sizes[len(sizes) // 3 :])
        verdict = "too few epochs" if levels.count < 5 else "climbs" if climbs else "levels off"
        return cls(verdict, slope / levels.stride, levels.count, sizes[0], sizes[-1])

    @classmethod
    def over_time(cls, floors: Sequence[int], step_s: float) -> Growth:
        """By the least that was held in each of some equal times, which what a batch needs for a while is not in."""
        late = floors[len(floors) // 3 :]
        slope, climbs = _climb(late)
        ends = late[0], late[-1], len(late) * step_s
        return cls("climbs" if climbs else "levels off", slope * 60 / step_s, 0, *ends)

    @property
    def climbed_bytes(self) -> int:
        return self.last_bytes - self.first_bytes

    def __str__(self) -> str:
        first, last, climbs = format_bytes(self.first_bytes), format_bytes(self.last_bytes), self.verdict == "climbs"
        over, unit = f"Over {self.epochs} epochs", "an epoch"
        ends = f": {first} after the first, {last} after the last"
        if self.over_s is not None:
            over, unit, ends = f"Over {self.over_s:.0f} s", "a minute", f", from {first} to {last}"
            ends += ": a leak, unless it is still reading its data" if climbs else ""
        slope = f" by {format_bytes(self.slope_bytes)} {unit}" if climbs else ""
        return f"{over} memory {self.verdict}{slope}{ends}."


def _climb(late: Sequence[int]) -> tuple[float, bool]:
    """The slope, and whether it is one: 85 % of all pairs rise, by 8 MB and 1 % in all, and hardly slower in the end.

    A leak keeps its slope. What warms up, 1 - exp(-t) or log(t), has at most 0.6 of it in the second half.
    """
    rises, half = _rises(late), len(late) // 2
    slope, first, second = (
        statistics.median(part or [0.0]) for part in (rises, _rises(late[: half + 1]), _rises(late[half:]))
    )
    rising = sum(rise > 0 for rise in rises) >= 0.85 * len(rises)
    return slope, rising and slope * (len(late) - 1) > max(8 * MB, 0.01 * late[0]) and second >= 0.7 * first


def _rises(sizes: Sequence[int]) -> list[float]:
    """The slope between each two: their median does not heed a spike."""
    return [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(sizes), 2)]


class Tally:
    """An attempt of a run, by its events and samples in the order of time. A `start` begins anew.

    Attributes:
        phases: The most that was held in any sample in phases of each name, "" between phases, in bytes.
        parts: The named parts that are held now, in bytes; `largest_parts` their largest sizes.
        peaks: The largest sample of each column, of their sums, and of what is held (`Reading.held`), in bytes.
        last: What was held at the last sample: anonymous, shared and file bytes.
        events: The last event of each kind that the ending of a run is told by: `start`, `dataset`, `metrics`,
            `cuda_oom`, `resumed`, `finished`, and the first `rank ended`.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self.phases: dict[str, int] = {}
        self.parts: dict[str, int] = {}
        self.largest_parts: dict[str, int] = {}
        self.peaks: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.duration_s = 0.0
        self._began_s = began_s
        self._levels: dict[str, Levels] = {}  # by what names the epochs: a loop may have phases and marks in each
        self._floors, self._floor_s = list[int](), 0.25  # the least held in each such time, of which there are 24
        self.num_processes: int | None = None  # at the last sample
        self._open: list[PhaseNow] = []
        self._failed: PhaseNow | None = None
        self._newest: PhaseNow | None = None

    @property
    def phase(self) -> PhaseNow | None:
        """The innermost phase that is open or failed, else the one that began last; None before the first."""
        innermost = self._open[-1:]  # a copy, as others than the recorder's thread may ask
        if innermost and (self._failed is None or innermost[0].depth >= self._failed.depth):
            return innermost[0]
        return self._failed or self._newest

    @property
    def held_bytes(self) -> int | None:
        """Anonymous + shared memory at the last sample."""
        return self.last["anon"] + self.last["shmem"] if self.last else None

    @property
    def held_peak_bytes(self) -> int | None:
        return self.peaks.get("held_bytes")

    @property
    def growth(self) -> Growth | None:
        """By the phases called "epoch" or "train epoch", or by what was marked as "epoch".

        Where there are not five of them, that of another command than the trainer over time, from 5 s on; else None.
        """
        levels = max(self._levels.values(), key=lambda levels: levels.count, default=Levels())
        watched = self.events.get("start", {}).keys() & {"command", "watched_pid"}
        if levels.count < 5 and watched and len(self._floors) * self._floor_s >= 5:
            return Growth.over_time(self._floors, self._floor_s)
        return Growth.of(levels) if self._levels else None

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            vars(self).update(vars(Tally(event["time_s"])))
            self.events[kind] = {name: value for name, value in event.items() if name != "previous"}
        elif kind == "begin":
            label = phase_label(event["phase"], event)
            self._newest = PhaseNow(event["phase"], label, len(self._open), self.held_bytes, event["time_s"])
            self._open.append(self._newest)
        elif kind == "end":
            self._level(event["phase"], event)
            self._end(event)
        elif kind == "mark":
            self._level(event["name"], event)
        elif kind == "part":
            name, size = event["name"], int(event["bytes"])
            self.parts.pop(name, None)
            if size:
                self.parts[name] = size
            self.largest_parts[name] = max(self.largest_parts.get(name, 0), size)
        elif kind in _KEPT and not (kind == "rank ended" and kind in self.events):
            self.events[kind] = dict(event)

    def _level(self, name: str, event: Mapping[str, Any]) -> None:
        # The process's own count is exact at that moment; where there are others too, the last sample has them all.
        held = event.get("held_bytes") if (self.num_processes or 1) <= 1 else self.held_bytes
        if held is not None and (epoch := _EPOCH.fullmatch(name)):
            self._levels.setdefault(f"{event['event']} {epoch[1].lower()}", Levels()).add(held)

    def _end(self, event: Mapping[str, Any]) -> None:
        while self._open:
            phase = self._open.pop()
            if phase.name == event["phase"]:
                if "failed" in event and (self._failed is None or phase.depth >= self._failed.depth):
                    self._failed = phase
                return

    def sample(self, time_s: float, reading: Reading) -> None:
        if self._began_s is None:
            self._began_s = time_s
        self.duration_s = time_s - self._began_s
        self.num_processes = reading.num_processes
        sizes = {name: size for name in SIZES if (size := getattr(reading, name)) is not None}
        sizes.pop("cgroup_limit_bytes", None)
        if "rss_anon_bytes" in sizes:
            anon, shmem, file = (sizes.get(f"rss_{part}_bytes", 0) for part in ("anon", "shmem", "file"))
            sizes |= {"rss_bytes": anon + shmem + file, "anon_shmem_bytes": anon + shmem}
        if "cgroup_anon_bytes" in sizes:
            sizes["cgroup_anon_shmem_bytes"] = sizes["cgroup_anon_bytes"] + sizes["cgroup_shmem_bytes"]
        if (held := reading.held()) is not None:
            self.last = dict(zip(("anon", "shmem", "file"), held, strict=True))
            name, size = self._open[-1].name if self._open else "", held[0] + held[1]
            sizes["held_bytes"] = size
            self.phases[name] = max(self.phases.get(name, 0), size)
            self._floor(size)
        for name, size in sizes.items():
            self.peaks[name] = max(self.peaks.get(name, 0), size)

    def _floor(self, size: int) -> None:
        while self.duration_s >= 24 * self._floor_s:
            pairs = itertools.zip_longest(self._floors[::2], self._floors[1::2], fillvalue=2**63)
            self._floors, self._floor_s = [min(pair) for pair in pairs], 2 * self._floor_s
        at = int(max(0.0, self.duration_s) / self._floor_s)
        self._floors += [size] * (at + 1 - len(self._floors))
        self._floors[at] = min(self._floors[at], size)
