"""Checkpoints that cannot be bad: atomic, checksummed and validated; no pickle."""

from stayfinite.checkpoint.inspect import first_bad_checkpoint as first_bad_checkpoint
from stayfinite.checkpoint.inspect import latest_good as latest_good
from stayfinite.checkpoint.load import Checkpoint as Checkpoint
from stayfinite.checkpoint.load import load_checkpoint as load_checkpoint
from stayfinite.checkpoint.load import validate_checkpoint as validate_checkpoint
from stayfinite.checkpoint.problem import Problem as Problem
from stayfinite.checkpoint.save import async_save_checkpoint as async_save_checkpoint
from stayfinite.checkpoint.save import save_checkpoint as save_checkpoint
