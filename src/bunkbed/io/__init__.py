"""Import and export of a table's rows, in the memory of a few chunks.

`import_rows` and `export_rows` are the public functions; `formats` lists the formats, each in a file of its own.
"""

from bunkbed.io.common.source import Progress as Progress
from bunkbed.io.exporting import export_rows as export_rows
from bunkbed.io.importing import import_rows as import_rows
