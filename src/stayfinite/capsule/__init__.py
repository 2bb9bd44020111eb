"""One file that replays a bad step elsewhere: made, read, replayed and made small."""

from stayfinite.capsule.file import Capsule as Capsule
from stayfinite.capsule.file import read_capsule as read_capsule
from stayfinite.capsule.file import write_capsule as write_capsule
