"""The main job: recommenders from implicit feedback, on tables larger than memory.

The modules are imported one by one (`bunkbed.train.data`, `bunkbed.train.loop`, ...), so that what needs torch
or pyarrow loads only where it is used.
"""
