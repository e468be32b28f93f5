"""Everything that can go wrong with a disk or a process, and an oracle that says what a table must hold afterwards.

``python -m torture`` runs all of it, ``python -m torture --list`` names the parts. The tests run each in a short form.
"""
