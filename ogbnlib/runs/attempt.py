"""One attempt of a run: from its event `start` to its result.json."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..errors import InputError
from ..files import write_json
from ..forecast.phases import audit
from ..forecast.sizes import GraphSize
from ..memory.recorder import EVENTS, RUNS_VARIABLE, TIMELINE, Recorder
from .diagnosis import UNFINISHED, explain
from .folder import METRICS, RESULT, Run


class Attempt:
    """Marks the start of an attempt, holds what records it, and writes its result.

    The result of an earlier attempt moves to the events: it must not pass for this one's, and must not be lost. Where
    this one refuses its input before it has gone on from the checkpoint, the folder is again as it was.
    """

    def __init__(self, before: Run, config: TrainConfig | None = None, **info: Any):
        self.before, self.config, self.run_dir = before, config, before.run_dir
        self.recorder = Recorder(self.run_dir)
        self._sizes = {name: os.path.getsize(self.run_dir / name) for name in (EVENTS, TIMELINE)}
        self.recorder.log.mark("start", **info, previous=before.result or None)
        (self.run_dir / RESULT).unlink(missing_ok=True)
        runs = Path(os.environ.get(RUNS_VARIABLE, ""))
        if runs.is_file():  # gone where this process has outlived the one that asked
            with open(runs, "a") as file:
                file.write(f"{self.run_dir.resolve()}\n")
        self._begin = time.monotonic()

    def end(self, exit_code: int | None, *, with_forecast: bool = False, **evidence: Any) -> Run:
        """Write result.json: how the attempt ended, its peaks, and why it ended. The recorder has been stopped.

        Args:
            with_forecast: Put what was predicted for the config beside what was measured.
            evidence: What the limit knows: `memory_limit_bytes`, `limit_by`, `killed_by`, `oom_kills`, `outer_limit`,
                `kills_around`, `kernel_peak_bytes`, all absent for a run in this process; and whatever else belongs
                into the result.
        """
        tally = self.recorder.tally
        if exit_code == 0 and self.config is not None and "finished" not in tally.events:
            exit_code = UNFINISHED  # code of the user's model ended the trainer, os._exit(0) say
        kernel_peak = evidence.pop("kernel_peak_bytes", None)
        result: dict[str, Any] = {
            "exit_code": exit_code,
            "memory_limit_bytes": None,
            "limit_by": None,
            "killed_by": None,
            "oom_kills": None,
            **evidence,
            "duration_s": round(time.monotonic() - self._begin, 3),
            "peak_bytes": kernel_peak or tally.peaks.get("held_bytes"),
            "peak_source": "kernel counter" if kernel_peak else "samples",
            "sampled_peaks_bytes": tally.peaks,
            "last_metrics": self._last_metrics(),
            "growth": asdict(tally.growth) if tally.growth else None,
        }
        if with_forecast and self.config is not None:
            marked = tally.events.get("dataset")  # else the data set's own files name its size
            size = GraphSize(**{item.name: marked[item.name] for item in fields(GraphSize)}) if marked else None
            forecast = audit(self.config, result["memory_limit_bytes"], tally.phases, tally.largest_parts, size)
            result["forecast"] = {"size_from": "run" if marked else "files", **forecast}
        diagnosis = explain(self.run_dir, self.config, result, tally)
        result["diagnosis"] = diagnosis.to_dict()
        try:
            if exit_code == 2 and self.before.result and "resumed" not in tally.events:
                for name, num_bytes in self._sizes.items():
                    os.truncate(self.run_dir / name, num_bytes)
                write_json(self.run_dir / RESULT, self.before.result)
            else:
                write_json(self.run_dir / RESULT, result)
        except InputError as error:  # its work is done all the same, and its exit code is what matters
            gone = "" if self.run_dir.is_dir() else ", as the folder was deleted meanwhile"
            print(f"error: {self.run_dir / RESULT}: expected to write it, could not{gone}: {error}", file=sys.stderr)
        known = {} if self.config is None else {"config": self.config}
        return Run(self.run_dir, result=result, diagnosis=diagnosis, tally=tally, **known)

    def _last_metrics(self) -> dict[str, Any] | None:
        """The last epoch's, of this attempt or of those before."""
        if marked := self.recorder.tally.events.get("metrics"):
            return {key: value for key, value in marked.items() if key not in ("time_s", "event")}
        if not (self.run_dir / METRICS).is_file():
            return None  # and pandas, 0.3 s of imports, is not asked
        with contextlib.suppress(
            InputError
        ):  # a damaged one is named to who reads it, and written anew by a resumption
            metrics = Run(self.run_dir).metrics
            if len(metrics):
                return {str(key): None if value != value else float(value) for key, value in metrics.iloc[-1].items()}
        return None
