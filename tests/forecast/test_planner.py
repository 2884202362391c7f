"""A plan's verdict keeps its margin, what it suggests fits and runs, and it needs sizes alone."""

import json
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import forecast_table
from conftest import force_windows

from ogbnlib.config import TrainConfig
from ogbnlib.errors import InputError, format_bytes
from ogbnlib.forecast import run_forecast
from ogbnlib.forecast.batches import batch_bytes
from ogbnlib.forecast.fitting import FITS, TIGHT, WILL_NOT_FIT, verdict
from ogbnlib.forecast.machine import Machine, probe
from ogbnlib.forecast.pass_memory import READY
from ogbnlib.forecast.planner import ALLOCATIONS, ladder, plan
from ogbnlib.forecast.run_forecast import margin_bytes, predict
from ogbnlib.sources.official import KNOWN

MB, GB = 2**20, 2**30
PAPERS = KNOWN["ogbn-papers100M"]
STORE = replace(PAPERS, stored="store", feature_itemsize=2)
SEEDS = {"train": 5000, "valid": 100, "test": 100}
TINY = replace(PAPERS, num_nodes=20_000, num_edges=300_000, num_seeds=SEEDS)


def config(**values: Any) -> TrainConfig:
    return TrainConfig.create({"dataset": "ogbn-papers100M", **values})


@pytest.fixture
def build_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan with torch's build for CPUs, of which the committed figures are."""
    monkeypatch.setattr(run_forecast, "RUNTIME_BYTES", 354 * MB)


@pytest.mark.parametrize("policy", ["eager", "store"])
def test_a_verdict_is_claimed_outside_the_margin_only(policy: str) -> None:
    forecast = predict(config(loading=policy))
    need = forecast.least_bytes
    least = need - forecast.peak.parts.get(READY, 0)  # with an empty queue of batches
    margin = margin_bytes(need)
    assert margin == max(60 * MB, int(0.08 * need))
    limits = (need + margin, need + margin - 1, need, least - margin, least - margin - 1)
    assert [verdict(forecast, limit) for limit in limits] == [
        FITS, TIGHT, TIGHT, TIGHT, WILL_NOT_FIT,
    ]  # fmt: skip


@pytest.mark.parametrize(("num_seeds", "waiting"), [(1024, 0), (3 * 1024, 2), (10**6, 5)])
def test_no_more_batches_wait_than_an_epoch_has_left(num_seeds: int, waiting: int) -> None:
    size = replace(STORE, num_seeds={"train": num_seeds, "valid": 0, "test": 0})
    large = config(loading="store", num_neighbors=[15, 10], batch_size=1024)  # 40 MB a batch
    for limit in (None, 3 * GB):  # through the page cache, and in windows
        forecast = predict(large, size, memory_limit_bytes=limit)
        (train,) = [phase.parts for phase in forecast.phases if phase.name == "train"]
        assert ("windows" in train) == (limit is not None)
        batches = forecast.train.batches
        mean, largest = (batch_bytes(one, 128, 2) for one in (batches.mean, batches.largest))
        assert train[READY] == max(0, waiting - 1) * mean + (largest if waiting else 0)


def test_a_run_that_needs_its_queue_to_be_empty_is_not_refused() -> None:
    large = config(loading="store", spool="off", **LARGE)
    forecast = predict(large, STORE, memory_limit_bytes=GB)
    queue_bytes = forecast.peak.parts[READY]
    fewest = forecast.least_bytes - forecast.margin_bytes - queue_bytes
    assert queue_bytes > 300 * MB
    assert [verdict(forecast, limit) for limit in (fewest, fewest - 1)] == [TIGHT, WILL_NOT_FIT]


def test_a_plan_says_whether_its_batches_were_drawn(tiny_store: Path) -> None:
    unseen = plan(config(num_neighbors=[-1, -1, -1], loading="store"))
    drawn = plan(config(dataset=str(tiny_store)))
    assert "uncertain: no batch was drawn, as there is no store here" in str(unseen)
    assert unseen.forecast.margin_bytes > margin_bytes(unseen.forecast.least_bytes)
    assert "uncertain" not in str(drawn)
    assert [advice.to_dict()["batches"] for advice in (unseen, drawn)] == ["degrees", "drawn"]


def test_an_epoch_from_ram_takes_what_was_measured_at_full_size() -> None:
    large = config(**LARGE, num_threads=2, feature_dtype="float16")
    in_ram = predict(large).epoch_s
    assert in_ram == pytest.approx(408, rel=0.2)  # 2.89 batches/s with huge pages
    bf16 = predict(large.replace(precision="bf16")).epoch_s
    one_thread = predict(large.replace(num_threads=1)).epoch_s
    assert bf16 < 0.8 * in_ram < one_thread


def test_auto_takes_one_thread_for_small_steps_and_all_cores_for_large_ones() -> None:
    forecasts = map(predict, (config(), config(**LARGE), config(num_threads=3, **LARGE)))
    threads = [one.train.computation(one.train.batch).threads(cores=8) for one in forecasts]
    assert threads == [1, 8, 3]
    machine = Machine(8, 75e9, 1.2e9, 150e9)
    advice = plan(config(**LARGE), size=KNOWN["ogbn-papers100M"], machine=machine)
    assert advice.to_dict()["num_threads"] == 8
    assert "num_threads=8" in str(advice)


def test_times_follow_the_machine() -> None:
    size, slow = KNOWN["ogbn-papers100M"], Machine(2, 20e9, 0.2e9, bf16_flops_per_s=1e9)
    large = config(**LARGE, num_threads=2, feature_dtype="float16")
    faster = replace(slow, flops_per_s=60e9, disk_bytes_per_s=2e9)
    for one in (large, large.replace(loading="store", spool="off")):
        epochs_s = [
            predict(one, size, memory_limit_bytes=64 * GB, machine=each).epoch_s
            for each in (slow, faster)
        ]
        assert epochs_s[0] > 2 * epochs_s[1] > 0
    assert 1e9 < probe(size).flops_per_s < 1e12


SMALL = {"num_neighbors": [3, 2], "batch_size": 128, "hidden_channels": 16}
KNOBS = ("loading", "feature_dtype", "num_workers", "batch_size", "num_neighbors")
LARGE = {"num_neighbors": [15, 10, 5], "batch_size": 1024, "hidden_channels": 256}
MANY = {"num_workers": 4, "persistent_workers": True}
CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("64 GB", {"loading": "eager"}, [{"loading": "store"}]),
    ("48 GB", {"loading": "lazy"}, [{"loading": "store"}]),
    ("62 GB", {"loading": "shared", **MANY, "num_workers": 8, **LARGE},
     [{"loading": "store"}, {"feature_dtype": "float16"}]),
    ("1400 MB", {"loading": "store", **MANY, **LARGE},
     [{"batch_size": 256}, {"num_neighbors": (8, 5, 3)}]),
    ("600 MB", {"loading": "shared", "num_neighbors": [-1, -1], "batch_size": 1000},
     [{"loading": "store", "num_neighbors": (4, 4)}]),  # with all neighbors a hub may come
]  # fmt: skip


@pytest.mark.parametrize(
    "row", forecast_table.rows(), ids=lambda row: f"{row.figures['what']}, {row.figures['machine']}"
)
def test_an_epoch_from_disk_takes_what_was_measured(row: forecast_table.Row) -> None:
    moved, seconds, peak = map(row.ratio, ("moved_gb", "seconds", "peak_gb"))
    assert moved is None or 1 / 1.3 < moved < 1.3
    assert seconds is None or 1 / 1.5 < seconds < 1.5
    assert peak is None or peak >= 1


@pytest.mark.usefixtures("build_for_cpus")
def test_the_guides_table_of_measurements_is_that_of_today() -> None:
    page = forecast_table.GUIDE.read_text()
    # else: python tests/benchmarks/forecast_table.py --write
    assert forecast_table.written(page) == page


# The rows of README's table: changes of a config, and whether an own loop's edges are sorted.
WAYS: list[tuple[dict[str, Any], bool]] = [
    ({"loading": "eager"}, False),
    ({"loading": "lazy"}, False),
    ({"loading": "eager"}, True),
    ({"loading": "eager", "feature_dtype": "float16"}, True),
    ({"loading": "shared"}, False),
    ({"loading": "shared", "feature_dtype": "float16"}, False),
    ({"loading": "store"}, False),
]


@pytest.mark.usefixtures("build_for_cpus")
def test_readmes_and_first_notebook_have_the_planners_table() -> None:
    expected = []  # peak and verdict of each way, directed and with reverse edges
    for changes, is_sorted in WAYS:
        limit = "4 GB" if changes["loading"] == "store" else "128 GB"
        both = (config(**changes, undirected=undirected) for undirected in (False, True))
        expected.append([plan(one, limit, is_sorted=is_sorted).in_short for one in both])
    assert expected[2] == ["80 GB, FITS", "104 GB, FITS"]
    verdict = r"\d+ GB, (?:FITS|TIGHT|WILL NOT FIT)"
    root = forecast_table.GUIDE.parents[2]
    loaded = []
    for undirected in (False, True):
        phases = predict(config(loading="eager", undirected=undirected)).phases
        loaded += [phase.held_bytes for phase in phases if phase.name == "load"]
    for page in ("README.md", "README.zh-CN.md"):
        text = (root / page).read_text()
        rows = re.findall(rf"^\| [^|]+ \| ({verdict}) \| ({verdict}) \|", text, re.MULTILINE)
        assert [*map(list, rows)] == expected
        sizes = re.search(r"PyG `Data`.*?(\d+).*?(\d+)", text, re.DOTALL)  # of `to_data`
        assert sizes
        assert [*map(int, sizes.groups())] == [round(size / GB) for size in loaded]
    book = json.loads((root / "notebooks" / "00_quickstart.ipynb").read_text())
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    texts = ["".join(output.get("data", {}).get("text/plain", "")) for output in outputs]
    (table,) = [text for text in texts if "WILL NOT FIT" in text]
    assert re.findall(verdict, table) == [cell for row in expected for cell in row]


@pytest.mark.usefixtures("build_for_cpus")
def test_sorted_edges_take_no_sort_and_are_one_line_of_a_plan() -> None:
    stock = plan(config(loading="eager"), "128 GB")
    own = plan(config(loading="eager"), "128 GB", is_sorted=True)
    parts = own.forecast.peak.parts
    assert {name: parts[name] for name in parts if "CSC" in name} == {
        f"{split} loader's CSC": 8 * (PAPERS.num_nodes + 1) for split in ("train", "valid", "test")
    }
    assert own.forecast.num_sorts == 0
    assert stock.forecast.num_sorts == 3 + 1  # for the final evaluation of train
    lazy = plan(config(loading="lazy", epochs=2, train_eval="final"))
    assert lazy.forecast.num_sorts == 1 + 2 * 2 + 1  # train, valid and test each epoch, train again
    (moved,) = [
        phase.parts["copy for workers"]
        for phase in plan(config(loading="eager", num_workers=2), is_sorted=True).forecast.phases
        if phase.parts.get("copy for workers")
    ]
    assert moved == 16 * PAPERS.num_edges
    lines = [line for line in str(stock).splitlines() if "is_sorted=" in line]
    assert [line.rpartition(": ")[2] for line in lines] == [own.in_short] == ["80 GB, FITS"]
    roomy = plan(config(loading="eager"), "200 GB")
    for other in (own, roomy, plan(config(loading="shared"), "40 GB")):
        assert "is_sorted=" not in str(other)


def test_the_full_size_figures_of_notebook_06_are_those_measured() -> None:
    book = json.loads((forecast_table.GUIDE.parents[1] / "06_out_of_core.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in book["cells"])
    known = {
        (float(row.figures["seconds"] or 0), float(row.figures["from_ram_s"] or 0))
        for row in forecast_table.rows()
    }
    printed = re.findall(r'GB": \(([\d.]+), ([\d.]+)\),', text)
    shown = {(float(disk_s), float(memory_s)) for disk_s, memory_s in printed}
    assert shown == {pair for pair in known if all(pair)}


@pytest.mark.usefixtures("build_for_cpus")
@pytest.mark.parametrize(("limit", "values", "expected"), CASES, ids=str)
def test_suggestions_fit_with_the_fewest_changes(
    limit: str, values: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    values = {"spool": "20 GB", **values}  # the free disk may change meanwhile
    advice = plan(config(**values), limit)
    assert advice.verdict != FITS
    assert [changes for changes, _ in advice.alternatives] == expected
    knobs = []
    for changes, forecast in advice.alternatives:
        again = plan(config(**values).replace(**changes), limit)
        assert again.verdict == FITS
        assert again.forecast.peak_bytes == forecast.peak_bytes
        knobs.append([KNOBS.index(name) for name in changes if name in KNOBS])
    assert len({len(turned) for turned in knobs}) == 1
    assert knobs == sorted(knobs)


@pytest.mark.parametrize("values", [{}, {"eval_num_neighbors": -1}], ids=str)
def test_a_card_has_a_verdict_of_its_own(values: dict[str, Any]) -> None:
    large = config(**LARGE, **values)
    need = sum(plan(large).forecast.gpu.values())  # of a training step, or a larger evaluation
    for card, expected in ((2 * need, FITS), (need, TIGHT), (need // 2, WILL_NOT_FIT)):
        advice = plan(large.replace(max_cuda_memory=card))
        assert advice.gpu_verdict == advice.to_dict()["gpu_verdict"] == expected
        assert f"under {format_bytes(card)}: {expected}" in str(advice)
    assert (need > 2 * sum(plan(config(**LARGE)).forecast.gpu.values())) == bool(values)


@pytest.mark.parametrize(("card_gb", "expected"), [(80, FITS), (1, WILL_NOT_FIT), (None, None)])
def test_the_gpu_of_the_machine_has_a_verdict(
    card_gb: int | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = types.SimpleNamespace(returncode=card_gb is None, stdout=f"{(card_gb or 0) * GB}\n")
    monkeypatch.setattr("ogbnlib.forecast.planner.subprocess.run", lambda *_, **__: child)
    large = config(**LARGE, device="cuda")
    advice = plan(large)
    assert advice.gpu_verdict == expected
    lines = [line for line in str(advice).splitlines() if line.startswith("a step on a GPU")]
    if card_gb is None:  # as on a login node
        assert lines[0].endswith(
            "no GPU is visible here: max_cuda_memory, its size, adds a verdict"
        )
    else:
        # 600 MB are for CUDA itself
        assert lines[0].endswith(f"under {format_bytes(card_gb * GB - 600 * MB)}: {expected}")
    assert plan(large.replace(max_cuda_memory=80 * GB)).gpu_verdict == FITS
    assert plan(large.replace(device="auto")).gpu_verdict is None


def test_a_store_has_its_own_features_and_none_of_another_width_is_suggested() -> None:
    found = plan(config(loading="shared"), "44 GB", size=STORE).alternatives
    assert [changes for changes, _ in found] == [{"loading": "store"}, {"feature_dtype": "float16"}]
    full = replace(STORE, feature_itemsize=4)
    for changes, _ in plan(config(loading="store", **LARGE), "800 MB", size=full).alternatives:
        assert "feature_dtype" not in changes


def test_the_table_names_phases_parts_peak_verdict_and_the_memory_to_ask_for() -> None:
    advice = plan(config(loading="eager"), "64 GB")
    text = str(advice)
    phases = [phase.name for phase in advice.forecast.phases]
    for words in (*phases, WILL_NOT_FIT, "#SBATCH --mem=190G", "test loader's CSC"):
        assert words in text
    facts = json.loads(json.dumps(advice.to_dict()))
    assert all(sum(phase["parts"].values()) == phase["held_bytes"] for phase in facts["phases"])
    assert facts["peak_bytes"] == max(phase["held_bytes"] for phase in facts["phases"])


def test_the_memory_to_ask_for_holds_the_peak_and_its_margin_and_fits_the_limit() -> None:
    shared, asked = predict(config(loading="shared")), plan(config(loading="shared")).sbatch
    assert int(asked.split("=")[1][:-1]) * GB >= shared.peak_bytes + margin_bytes(shared.peak_bytes)
    for limit in ("4 GB", "8 GB", "16 GB", "32 GB"):
        advice = plan(config(loading="store", **LARGE), limit)
        assert advice.verdict == FITS
        assert int(advice.to_dict()["sbatch"].split("=")[1][:-1]) <= int(limit.split()[0])


def test_the_ladder_has_a_row_for_each_allocation_and_a_mistake_is_not_nothing_fits() -> None:
    table = ladder()
    assert list(table.index) == list(ALLOCATIONS)
    assert (table["loading"] != "nothing fits").all()
    assert (table["peak GB"] <= [int(allocation.split()[0]) for allocation in ALLOCATIONS]).all()
    assert set(ladder(loading="eager")["loading"]) == {"eager", "nothing fits"}
    with pytest.raises(InputError, match="did you mean 'batch_size'"):
        ladder(batchsize=3)
    with pytest.raises(InputError, match="data set"):
        ladder("ogbn-paper")


@pytest.mark.parametrize("loading", ["eager", "store", "propagated"])
def test_planning_imports_no_torch_and_by_name_no_compiler(loading: str, tiny_store: Path) -> None:
    code = "import sys; from ogbnlib.forecast.planner import plan; from ogbnlib.config import TrainConfig\n"
    code += "values = {'loading': sys.argv[1], 'model': 'sign' if sys.argv[1] == 'propagated' else 'sage'}\n"
    code += "plan(TrainConfig.create(dataset='ogbn-papers100M', **values), '640 GB')\n"
    code += "print(sorted({'torch', 'torch_geometric', 'numba', 'pandas'} & set(sys.modules)))\n"
    code += "plan(TrainConfig.create(dataset=sys.argv[2], **values), '1 GB'); print('torch' in sys.modules)"
    argv = [sys.executable, "-c", code, loading, str(tiny_store)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "False"]


@pytest.mark.parametrize("spool", ["off", "24 GB"])
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_what_fits_at_full_size_keeps_its_limit(dtype: str, undirected: bool, spool: str) -> None:
    values = {"feature_dtype": dtype, "undirected": undirected, "spool": spool, **LARGE}
    large = config(loading="store", **values)
    for limit in range(2 * GB, 9 * GB, GB):
        advice = plan(large, limit)
        assert advice.verdict != FITS or advice.forecast.peak_bytes <= limit, limit


@pytest.mark.parametrize(("workers", "lookahead"), [(4, "auto"), (0, "off"), (40, "64 MB")])
def test_what_is_said_to_fit_has_its_peak_below_the_limit(workers: int, lookahead: str) -> None:
    nodes, edges = PAPERS.num_nodes // 200, PAPERS.num_edges // 200
    seeds = {split: count // 200 for split, count in PAPERS.num_seeds.items()}
    size = replace(STORE, num_nodes=nodes, num_edges=edges, num_seeds=seeds)
    force_windows(lookahead)
    asked = config(loading="store", num_workers=workers)
    for limit in range(380 * MB, 2 * GB, 20 * MB):
        advice = plan(asked, limit, size=size)
        assert advice.verdict != FITS or advice.forecast.peak_bytes <= limit, limit
