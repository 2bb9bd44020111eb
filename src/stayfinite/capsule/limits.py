"""How large a capsule may be; a reader refuses more, so that no file can fill the memory."""

from __future__ import annotations

MIB = 1 << 20

FILE = 160 * MIB
HEADER = 4 * MIB
TENSORS = 4_000
CONTAINERS = 100_000  # brackets in the header: a million of them take seconds to parse
STATE = 96 * MIB  # a larger state before the step is only hashed
HASHED = 1024 * MIB  # of a larger one only names and shapes are noted
BATCH = 32 * MIB
OPERATION = 12 * MIB  # the inputs of one operation; a larger one is only described
SOURCE = 1 * MIB
SOURCES = 8 * MIB
FILES = 400
