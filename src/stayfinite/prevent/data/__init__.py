"""Is the data fit to train on? Every batch looked at once, and the bad samples by their index."""

from stayfinite.prevent.data.check import batch_risks as batch_risks
from stayfinite.prevent.data.check import check_data as check_data
from stayfinite.prevent.data.problems import DataFinding as DataFinding
from stayfinite.prevent.data.problems import DataReport as DataReport
