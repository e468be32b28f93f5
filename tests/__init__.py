"""A package, so that pytest puts the root of the repository on ``sys.path`` and not this folder.

On the path, the folders ``torch`` and ``keras`` would be found by ``import torch`` where torch is not installed.
The folders themselves are no packages: file names are unique, and helpers of several files are in ``support``.
"""
