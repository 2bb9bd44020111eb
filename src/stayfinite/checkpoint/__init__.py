"""Checkpoints that cannot be bad: atomic, checksummed and validated; no pickle."""

from stayfinite.checkpoint.first_bad import first_bad_checkpoint as first_bad_checkpoint
from stayfinite.checkpoint.latest import latest_good as latest_good
from stayfinite.checkpoint.loading import Checkpoint as Checkpoint
from stayfinite.checkpoint.loading import load_checkpoint as load_checkpoint
from stayfinite.checkpoint.loading import validate_checkpoint as validate_checkpoint
from stayfinite.checkpoint.problems import Problem as Problem
from stayfinite.checkpoint.saving import save_checkpoint as save_checkpoint
