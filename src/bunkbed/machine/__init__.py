"""What this machine allows, and what a training step must cost on it.

`rates` measures the machine, `limits` has the formulas, `text` says both in words.
"""

from bunkbed.machine.rates import Machine as Machine
from bunkbed.machine.rates import measure as measure
from bunkbed.machine.rates import remembered as remembered
