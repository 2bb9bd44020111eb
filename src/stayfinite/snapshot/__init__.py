"""The state of training, captured and put back in place, bit for bit."""

from stayfinite.snapshot.batches import KeptBatch as KeptBatch
from stayfinite.snapshot.batches import RecentBatches as RecentBatches
from stayfinite.snapshot.mark import Mark as Mark
from stayfinite.snapshot.rng import RandomState as RandomState
from stayfinite.snapshot.state import Snapshot as Snapshot
from stayfinite.snapshot.state import SnapshotRing as SnapshotRing
from stayfinite.snapshot.state import TrainingState as TrainingState
