"""inject(): make a chosen value of a training go bad, to see what happens then."""

from stayfinite.testing.fault import Fault as Fault
from stayfinite.testing.harm import Hit as Hit
from stayfinite.testing.harm import Value as Value
from stayfinite.testing.injection import inject as inject
