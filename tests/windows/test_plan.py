"""What a loader may take is one rule, for the loaders and for the forecast."""

import time

from conftest import force_windows

from ogbnlib.config import TrainConfig
from ogbnlib.errors import GB, MB
from ogbnlib.forecast.batches import Batches, BatchShape
from ogbnlib.forecast.pass_memory import Pass, Windows
from ogbnlib.forecast.run_forecast import predict
from ogbnlib.sources.official import KNOWN
from ogbnlib.windows.plan import Budget, choose_windows

STORE = {"dataset": "x", "loading": "store", "feature_dtype": "float16"}
PAIR = Windows(10, 450 * MB, GB, 5)


def test_ranks_share_a_lookahead_of_a_size() -> None:
    # what is left is each rank's own already
    assert Budget(5 * GB, 0, sharers=4).bytes_beside() == 5 * GB
    assert Budget(None, 0).bytes_beside(PAIR) is None
    force_windows(GB)
    assert Budget(5 * GB, 0, sharers=4).bytes_beside() == GB // 4


def test_windows_on_disk_are_chosen_fast() -> None:
    batch, moved = BatchShape((128, 384, 768), (384, 768)), []
    # Where one structure file has all batches, the rows in memory take no room from it: 20 epochs.
    for epochs in (2**31 - 1, 200):
        config = TrainConfig.create(**STORE, epochs=epochs)
        one = Pass(config, KNOWN["ogbn-papers100M"], "train", Batches.of(batch), reserve=(0, 0))
        begun_s = time.process_time()
        chosen = choose_windows(one, 3 * GB, 30 * GB)
        assert time.process_time() - begun_s < 1
        assert chosen.spooling is not None
        assert chosen.spooling.disk_bytes <= 30 * GB
        moved.append(chosen.moved_bytes)
    assert 0.8 < moved[0] / moved[1] <= 1.02  # an epoch of a long run costs no more


def test_the_phase_that_fills_the_spool_has_its_pass() -> None:
    # also where an evaluation of the train split has windows of the same sizes
    large = {"num_neighbors": (15, 10, 5), "batch_size": 1024, "undirected": True}
    config = TrainConfig.create(**STORE, **large, spool="100 GB", epochs=1)
    force_windows(GB)
    forecast = predict(config, KNOWN["ogbn-papers100M"])
    parts = {phase.name: phase.parts for phase in forecast.phases}
    spool = "pass for the spool"
    assert (spool in parts["train"], spool in parts["final train"]) == (True, False)
