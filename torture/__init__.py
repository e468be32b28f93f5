"""Failures of disks and processes, and an oracle of the state that a table must have afterwards.

``python -m torture`` runs all parts, ``python -m torture --list`` lists them. The tests run a short form of each part.
"""
