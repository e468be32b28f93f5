"""The rates of this machine, and the minimum cost of a training step on it.

`rates` measures the machine, `limits` has the formulas, `text` formats both.
"""

from bunkbed.machine.rates import Machine as Machine
from bunkbed.machine.rates import measure as measure
from bunkbed.machine.rates import remembered as remembered
